"""Published layouts become manifests; what does not fit is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.errors import DataError, SettingsError
from outrider.evals.convert import from_mer, from_secap
from outrider.evals.manifest import load_set, write_manifest


@pytest.fixture
def wav(tmp_path: Path) -> Path:
    folder = tmp_path / "wav"
    folder.mkdir()
    for name in ("a1.wav", "a2.wav", "a3.flac"):
        (folder / name).touch()
    return folder


def file(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_secap_s_lines(wav: Path, tmp_path: Path) -> None:
    captions = file(tmp_path, "captions.txt", "a1 心情平静，不急躁。 \na3\t非常愉快、高兴\n\n")
    said = file(tmp_path, "text.txt", "a1 你好 世界。 \na9 多的\n")
    first, second = from_secap(captions, wav, said)
    assert (first.id, first.lang, first.references) == ("a1", "zh", ("心情平静，不急躁。",))
    assert (first.transcript, second.transcript) == ("你好 世界。", None)
    assert second.audio == wav / "a3.flac"


def test_secap_s_json_and_scp(wav: Path, tmp_path: Path) -> None:
    captions = file(tmp_path, "fid2captions.json", json.dumps({"a1": "悲伤", "a2": "激动"}))
    scp = file(tmp_path, "wav.scp", "a2 wav/a2.wav\na1 wav/a1.wav\n")
    items = from_secap(captions, scp)
    assert [item.audio for item in items] == [wav / "a1.wav", wav / "a2.wav"]
    write_manifest(tmp_path / "m.jsonl", items)
    assert load_set(tmp_path / "m.jsonl") == items


def test_secap_s_faults(wav: Path, tmp_path: Path) -> None:
    captions = file(tmp_path, "c.txt", "a1 平静\na2\na1 又\n")
    with pytest.raises(DataError, match="2 faults") as caught:
        from_secap(captions, wav)
    assert "line 2: a2 has no value" in str(caught.value)
    assert "line 3: a1 is on line 1 already" in str(caught.value)
    with pytest.raises(DataError, match="line 1: b1: no recording"):
        from_secap(file(tmp_path, "d.txt", "b1 平静"), wav)
    for name, text in (("e.txt", "\n"), ("f.json", "[1]"), ("g.json", "{"), ("h.json", '{"a": 1}')):
        with pytest.raises(DataError, match=name):
            from_secap(file(tmp_path, name, text), wav)
    with pytest.raises(SettingsError, match="lang 'fr'"):
        from_secap(captions, wav, lang="fr")


def test_mer_s_tables_are_joined(wav: Path, tmp_path: Path) -> None:
    reasons = file(tmp_path, "track3.csv", '\ufeffname,reason\na1,"In the audio, the tone is calm.\nYes."\na2,Loud.\n')
    labels = file(tmp_path, "track2.csv", 'name,openset\na2,"[angry, loud]"\na1,[]\n')
    said = file(tmp_path, "subtitle_chieng.csv", "name,chinese,english\na1,好,fine\nzz,x,y\n")
    first, second = from_mer([reasons, labels, said], wav, lang="en")
    assert first.references == ("In the audio, the tone is calm.\nYes.",)
    assert (first.transcript, first.labels) == ("fine", {})
    assert (second.transcript, second.labels) == (None, {"openset": "[angry, loud]"})


def test_mer_s_columns_of_a_language(wav: Path, tmp_path: Path) -> None:
    table = file(tmp_path, "gt.csv", "names,chi_reasons,eng_reasons,mood\na1,平静,calm,m\na2,愤怒,,n\n")
    assert [item.references for item in from_mer([table], wav, lang="zh")] == [("平静",), ("愤怒",)]
    assert [item.references for item in from_mer([table], wav, lang="en")] == [("calm",)]
    labelled = from_mer([table], wav, lang="en", columns={"label:mood": "mood", "caption:en": ["chi_reasons"]})
    assert labelled[0].labels == {"mood": "m"}
    assert labelled[0].references == ("平静",)


def test_mer_s_faults(wav: Path, tmp_path: Path) -> None:
    bad = file(tmp_path, "bad.csv", 'name,reason\na1,"two\nlines"\na1,again\n,none\na2,b,c\n')
    with pytest.raises(DataError, match="3 faults") as caught:
        from_mer([bad], wav, lang="en")
    assert "line 4: a1 is on line 2 already" in str(caught.value)
    assert "line 5: no name" in str(caught.value)
    assert "line 6: 3 cells under 2 columns" in str(caught.value)
    with pytest.raises(DataError, match="line 3: b7: no recording"):
        from_mer([file(tmp_path, "b.csv", "name,reason\na1,x\nb7,y\n")], wav, lang="en")
    with pytest.raises(DataError, match="columns name, tone"):
        from_mer([file(tmp_path, "c.csv", "name,tone\na1,x\n")], wav, lang="en")
    with pytest.raises(DataError, match="no caption in en"):
        from_mer([file(tmp_path, "d.csv", "name,chi_reasons\na1,x\n")], wav, lang="en")
    for text in ("", 'name,"reason\na1,x'):
        with pytest.raises(DataError, match="has the columns"):
            from_mer([file(tmp_path, "f.csv", text)], wav, lang="en")
    with pytest.raises(DataError, match="line 2: not valid CSV"):
        from_mer([file(tmp_path, "e.csv", 'name,reason\na1,"x\n')], wav, lang="en")
    with pytest.raises(DataError, match="no table has the column given for label:mood"):
        from_mer([bad.with_name("b.csv")], wav, lang="en", columns={"label:mood": "mood"})
    with pytest.raises(SettingsError, match="no such field captions"):
        from_mer([bad], wav, lang="en", columns={"captions": "reason"})
