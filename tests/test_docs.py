"""What the documents show is true: their commands run, their Python runs, their outputs are real."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import soundfile
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.cli.subprocess_cloud import cloud_process
from outrider.engines.load import load_engine
from tests.support.certificates import Authority
from tests.support.fake_llm_server import Model
from tests.support.fake_vllm import VllmServer
from tests.support.gateway_process import running_gateway
from tests.support.processes import HANG_S, started
from tests.support.tokenizers import byte_level

ROOT = Path(__file__).parents[1]
FIRST = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*FIRST, *sorted((ROOT / "docs").rglob("*.md"))]
STAND_INS = {  # checkpoints that a reader would fetch from a hub: the bundled pair, called a text pair
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": "text-edge",
    "Qwen/Qwen2.5-Coder-1.5B-Instruct": "text-cloud",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "other-edge",  # a model with a tokenizer of its own
}


def fences(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page that carry this language."""
    pattern = r"^```([a-z]*)\n(.*?)^```$"
    found = re.findall(pattern, page.read_text(encoding="utf-8"), re.M | re.S)
    return [text for name, text in found if name == language]


def commands() -> list[str]:
    lines = [line for page in PAGES for block in fences(page, "") for line in block.splitlines()]
    shown = [line.split("  #")[0].strip() for line in lines if line.startswith("outrider ")]
    assert shown, "the pages show no command: the search for them is broken"
    return shown


TOKEN = "a-token-that-is-long-enough"
PLAIN, SECURED = "127.0.0.1:7070", "cloud.example:7070"  # the addresses that the pages name
VLLM = "127.0.0.1:8000"
GATEWAY = "http://127.0.0.1:8080"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recording, certificates and tokens, as the examples expect."""
    clip = next(iter(sorted((ROOT / "src/outrider/demo/clips").glob("*.*g*"))))
    wave, rate = soundfile.read(clip)
    soundfile.write(tmp_path / "speech.wav", wave, rate)
    authority = Authority(tmp_path, "ca")
    issued = authority.server("cloud", ["localhost"])
    for source, name in ((authority.ca, "ca.pem"), (issued.cert, "cloud.pem"), (issued.key, "cloud.key")):
        if source != tmp_path / name:
            shutil.copy(source, tmp_path / name)
    for side in ("edge", "cloud"):
        copy = shutil.copytree(ROOT / "src/outrider/demo" / side, tmp_path / f"text-{side}")
        config = json.loads((copy / "config.json").read_text())
        del config["outrider_tasks"]
        (copy / "config.json").write_text(json.dumps(config))
    save_model_with_own_tokenizer(tmp_path / "other-edge")
    (tmp_path / "tokens.txt").write_text(f"reader {TOKEN}\n")
    (tmp_path / "tokens.txt").chmod(0o600)
    (tmp_path / "token.txt").write_text(TOKEN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save_model_with_own_tokenizer(folder: Path) -> None:
    tokenizer = byte_level()
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what `outrider eval` and `calibrate` leave behind: a short run of the bundled clips, and a gate."""
    folder = tmp_path_factory.mktemp("evaluated")
    outrider = [sys.executable, "-m", "outrider"]
    run = ["eval", "demo", "--out", "run", "--modes", "exact,cloud-only", "--trace"]
    gate = ["calibrate", "run/traces.jsonl", "--out", "gate.json", "--epsilon", "0.2"]
    for command in (run, gate):
        subprocess.run([*outrider, *command], cwd=folder, check=True, capture_output=True)
    return folder


@contextmanager
def reachable(text: str) -> Iterator[str]:
    """The text with the addresses that it names replaced by those of clouds that run."""
    with ExitStack() as stack:
        if PLAIN in text:
            texts = any(word in text for word in ("text-cloud", "other-edge", "--edge none"))
            text = text.replace(PLAIN, stack.enter_context(cloud_process("text-cloud" if texts else "demo")))
        if VLLM in text:
            server = stack.enter_context(VllmServer(Model(load_engine("text-cloud"))))
            text = text.replace(VLLM, f"127.0.0.1:{server.port}")
        if SECURED in text:
            options = ("--tls-cert", "cloud.pem", "--tls-key", "cloud.key", "--tokens", "tokens.txt")
            port = stack.enter_context(cloud_process("demo", *options)).rpartition(":")[2]
            text = text.replace(SECURED, f"localhost:{port}")
        if GATEWAY in text:
            text = text.replace(GATEWAY, stack.enter_context(running_gateway())[0])
        yield text


@pytest.mark.network  # two processes each
@pytest.mark.parametrize("line", commands())
def test_every_command_shown_runs(line: str, workplace: Path, request: pytest.FixtureRequest) -> None:
    if "run/" in line or "gate.json" in line or "report run" in line:
        shutil.copytree(request.getfixturevalue("evaluated"), workplace, dirs_exist_ok=True)
    for name, stand_in in STAND_INS.items():
        line = line.replace(name, stand_in)
    if line.startswith("outrider cloud") and "--help" not in line:
        serves(line)
        return
    with reachable(line) as line:
        if line.startswith("outrider edge") and "--help" not in line:
            serves(line)
            return
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(line)], capture_output=True, text=True, timeout=1500, check=False
        )
        assert done.returncode == 0, done.stderr


def serves(line: str) -> None:
    """The command listens, and ends in order when it is asked to."""
    words = shlex.split(line.replace(":7070", ":0").replace(":8080", ":0").replace(":9090", ":0"))
    with started([sys.executable, "-m", *words], stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        said = ""
        while not re.search(r"\bserving (demo|http)", said):  # and not "reserving"
            read = child.stderr.readline()
            assert read, said
            said += read
        child.terminate()
        assert child.wait(timeout=HANG_S) == 0, said + child.stderr.read()


@pytest.mark.network
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_python_example_runs(page: Path, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in fences(page, "python"):
        with reachable(block) as code:
            exec(compile(code, page.name, "exec"), {})


@pytest.mark.network
def test_the_demo_s_output_in_the_readme_is_a_real_one() -> None:
    shown = fences(ROOT / "README.md", "text")[0]
    command = [sys.executable, "-m", "outrider", "demo"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = {part.strip() for part in done.stdout.split("\n\n")}
    assert {part.strip() for part in shown.split("\n\n")} <= said
    assert "Same text as the cloud alone would give; the large model ran" in done.stderr


def test_every_file_that_a_page_links_to_exists() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_make_targets_that_are_named_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {
        name for page in PAGES for name in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(encoding="utf-8"), re.M)
    }
    assert named
    for name in named:
        assert re.search(rf"^{name}:", makefile, re.M), name


def test_the_wheel_would_carry_the_bundled_pair() -> None:
    assert shutil.which("git")
    ignored = subprocess.run(
        ["git", "check-ignore", "-q", "src/outrider/demo/cloud/model.safetensors"], cwd=ROOT, check=False
    )
    assert ignored.returncode == 1
