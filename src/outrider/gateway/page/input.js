// What is asked: a bundled clip, a recording of one's own, or a text.

import { base64, decode, noMicrophone, play, record, silence, wav } from "./audio.js";

const by = (id) => document.getElementById(id);
let chosen = null; // {name, format, seconds, bytes: () => Promise<ArrayBuffer>}
let tape = null; // the recording in progress
let switching = false; // it is being started or stopped
let clock = 0;
let connected = false;

export const kind = () => document.querySelector('input[name="kind"]:checked').value;

function showKind() {
  by("audio-input").hidden = kind() !== "audio";
  by("text-input").hidden = kind() !== "text";
}

/** fail: called with words. run: called where a choice is to be captioned at once. fetchClip: gives a clip's bytes. */
export function prepare({ hears, reads, clips, fetchClip, run, fail }) {
  document.querySelector('input[name="kind"][value="audio"]').disabled = !hears;
  document.querySelector('input[name="kind"][value="text"]').disabled = hears && !reads;
  document.querySelector(`input[name="kind"][value="${hears ? "audio" : "text"}"]`).checked = true;
  by("kind-reason").hidden = hears && reads;
  by("kind-reason").textContent = hears
    ? "This gateway's model only writes captions of recordings. For text, start it with text models (--edge, --cloud)."
    : "This gateway's model takes no recordings.";
  showKind();
  by("clips").replaceChildren(...ordered(clips).map((clip) => clipRow(clip, fetchClip, run, fail)));
  by("clips-lead").hidden = !clips.length;
  const no = noMicrophone();
  by("record").disabled = Boolean(no);
  by("record-reason").textContent = no;
  by("record-reason").hidden = !no || !hears;
  if (hears && !connected) connect(fail);
}

/** Those in the page's own language first. */
function ordered(clips) {
  const own = (clip) => Number(clip.lang === document.documentElement.lang);
  return [...clips].sort((a, b) => own(b) - own(a));
}

function clipRow(clip, fetchClip, run, fail) {
  const row = document.createElement("li");
  const name = clip.name.replace(/\.\w+$/, "");
  const length = `${clip.seconds.toFixed(1)} s`;
  const bytes = once(() => fetchClip(clip.url.replace(/^\//, "")));
  const own = { name, said: clip.said, format: clip.url.split(".").pop(), seconds: clip.seconds, bytes };
  const start = document.createElement("button");
  start.type = "button";
  start.className = "clip";
  start.lang = clip.lang;
  start.setAttribute("aria-label", `Caption clip ${name}, ${length}: ${clip.said}`);
  start.title = clip.said;
  start.append(name, Object.assign(document.createElement("small"), { textContent: length }));
  start.addEventListener("click", () => {
    choose(own);
    if (clip.lang) by("lang").value = clip.lang;
    run();
  });
  row.append(player(own, `Play clip ${name}`, fail), start);
  own.row = row;
  return row;
}

function once(make) {
  let kept = null;
  return async () => {
    kept = kept || (await make());
    return kept;
  };
}

function player(what, label, fail) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "play";
  button.textContent = "▶";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", () => toggle(button, what, fail));
  return button;
}

async function toggle(button, what, fail) {
  if (button.classList.contains("on")) {
    silence();
    return;
  }
  try {
    button.classList.add("on");
    button.textContent = "■";
    await play(await what.bytes(), () => rest(button));
  } catch (problem) {
    rest(button);
    fail(`The recording cannot be played: ${problem.message}`);
  }
}

function rest(button) {
  button.classList.remove("on");
  button.textContent = "▶";
}

function choose(what) {
  if (chosen && chosen.row) chosen.row.classList.remove("chosen");
  chosen = what;
  if (what.row) what.row.classList.add("chosen");
  by("chosen").hidden = Boolean(what.row);
  by("chosen-name").textContent = `${what.name}, ${what.seconds.toFixed(1)} s`;
}

/** A recording of one's own: read by the browser, sent as 16 kHz mono WAV. */
async function take(name, bytes, fail) {
  try {
    const { samples, seconds } = await decode(bytes);
    const sent = wav(samples);
    choose({ name, format: "wav", seconds, bytes: async () => sent });
    fail("");
  } catch (problem) {
    fail(`${name}: ${problem.message}`);
  }
}

function connect(fail) {
  connected = true;
  by("file").addEventListener("change", async () => {
    const [file] = by("file").files;
    if (file) await take(file.name, await file.arrayBuffer(), fail);
    by("file").value = "";
  });
  by("record").addEventListener("click", () => toggleTape(fail));
  by("play-chosen").addEventListener("click", () => toggle(by("play-chosen"), chosen, fail));
  const card = by("input");
  card.addEventListener("dragover", (event) => {
    event.preventDefault();
    card.classList.add("over");
  });
  card.addEventListener("dragleave", () => card.classList.remove("over"));
  card.addEventListener("drop", async (event) => {
    event.preventDefault();
    card.classList.remove("over");
    const [file] = event.dataTransfer.files;
    if (!file) return;
    document.querySelector('input[name="kind"][value="audio"]').checked = true;
    showKind();
    await take(file.name, await file.arrayBuffer(), fail);
  });
}

/** One click at a time: a second one would open the microphone again, and nobody would close the first. */
async function toggleTape(fail) {
  if (switching) return;
  switching = true;
  try {
    await switchTape(fail);
  } finally {
    switching = false;
  }
}

async function switchTape(fail) {
  const button = by("record");
  if (tape) {
    const running = tape;
    tape = null;
    clearInterval(clock);
    button.textContent = "Record";
    button.classList.remove("on");
    await take("your recording", await running.stop(), fail);
    return;
  }
  try {
    tape = await record();
  } catch (problem) {
    fail(`The microphone cannot be used: ${problem.message}`);
    return;
  }
  const began = performance.now();
  const tell = () => { button.textContent = `Stop recording (${((performance.now() - began) / 1000).toFixed(0)} s)`; };
  button.classList.add("on");
  tell();
  clock = setInterval(tell, 500);
}

/** The input as a request's address and fields, and the fields of `outrider` that go with it. Throws Error in words. */
export async function asked() {
  if (kind() === "text") return askedText();
  if (!chosen) throw new Error("Choose a clip, a file, or record something first.");
  const data = base64(await chosen.bytes());
  const part = { type: "input_audio", input_audio: { data, format: chosen.format } };
  return {
    path: "v1/chat/completions", fields: { messages: [{ role: "user", content: [part] }] },
    own: { task: by("task").value, lang: by("lang").value },
    about: chosen.said ? `${chosen.name} “${chosen.said}”` : chosen.name,
  };
}

function askedText() {
  const text = by("prompt").value;
  if (!text.trim()) throw new Error("Write a prompt first.");
  const about = "your text";
  if (by("form").value === "plain") return { path: "v1/completions", fields: { prompt: text }, own: {}, about };
  return { path: "v1/chat/completions", fields: { messages: [{ role: "user", content: text }] }, own: {}, about };
}

by("kind").addEventListener("change", showKind);
