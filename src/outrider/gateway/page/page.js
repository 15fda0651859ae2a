// The live page of `outrider edge`: starts runs, and shows what becomes of them.

import { asked, prepare } from "./input.js";
import { Panel } from "./panel.js";
import { chunks, reach, Refusal } from "./stream.js";
import { gainBeside } from "./gain.js";
import { canTogether, choice, decoding, fill, refresh, setRun, setTrouble, shownGate, way, works } from "./settings.js";
import { hide, isShown } from "./tip.js";
import { agreement } from "./tokens.js";

const by = (id) => document.getElementById(id);
const TITLES = { speculative: "Together", "edge-only": "Edge alone", "cloud-only": "Cloud alone" };
let key = "";
let model = "";
let running = null; // the AbortController of what runs
let panels = [];
let live = null; // {id, way, cut} of the request that is being answered
const LOOK_MS = 3000; // between two checks of the cloud

// Starting ------------------------------------------------------------------------------------------------------

async function start() {
  try {
    const info = await (await reach("v1/outrider", { key })).json();
    const models = await (await reach("v1/models", { key })).json();
    const clips = info.audio ? await (await reach("demo/clips", { key })).json() : [];
    model = models.data[0].id;
    by("key-form").hidden = true;
    by("edge-name").textContent = info.edge;
    [by("cloud-name").textContent, by("cloud-place").textContent] = [...info.cloud.split(" at "), ""];
    by("version").textContent = info.version;
    fill(info);
    prepare({ hears: info.audio, reads: info.text, clips, fetchClip, run: runOne, fail: say });
    by("compare").disabled = !canTogether();
    if (!canTogether())
      by("compare-reason").textContent = "Compare needs an edge and a cloud. Ctrl+Enter runs, Escape stops.";
    say("");
  } catch (problem) {
    failed(problem);
  }
}

const fetchClip = async (url) => (await reach(url, { key })).arrayBuffer();

function say(words) {
  by("status").textContent = words;
  by("status").classList.toggle("bad", false);
}

function failed(problem) {
  if (problem instanceof Refusal && problem.status === 401) askKey();
  say(problem.message);
  by("status").classList.toggle("bad", true);
}

function askKey() {
  by("key-form").hidden = false;
  by("key").focus();
}

by("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = by("key").value.trim();
  start();
});

// Running -------------------------------------------------------------------------------------------------------

function open(list, side) {
  panels.forEach((panel) => panel.leave());
  panels = list;
  hide();
  by("panels").className = side ? "side" : "";
  by("differs").hidden = !side;
  by("panels").replaceChildren(...list.map((panel) => panel.element));
  reveal();
}

/** On a phone, and from the settings, what runs can be out of sight. */
function reveal() {
  const { top } = by("panels").getBoundingClientRect();
  if (top >= 0 && top < innerHeight * 0.7) return;
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  by("output").scrollIntoView({ block: "start", behavior: still ? "instant" : "smooth" });
}

/** One run at a time: what still runs is stopped first. work: called with the signal that stops it. */
async function guarded(work) {
  if (!model) {
    await start(); // the gateway did not answer when the page was loaded
    return;
  }
  if (running) running.abort();
  const own = new AbortController();
  running = own;
  by("stop").setAttribute("aria-disabled", "false");
  by("output").setAttribute("aria-busy", "true");
  by("said").textContent = "";
  say("Running");
  try {
    await work(own.signal);
    if (running === own) say("Done");
  } catch (problem) {
    if (running !== own) return;
    if (problem.name === "AbortError") say("Stopped");
    else failed(problem);
  } finally {
    if (running === own) rest();
  }
}

function rest() {
  running = null;
  by("stop").setAttribute("aria-disabled", "true");
  by("output").setAttribute("aria-busy", "false");
}

/** Stream one completion into a panel. Throws what ended it early, after the panel has said it. more: fields of it. */
async function stream(panel, input, of, signal, more = {}) {
  const options = { ...choice(of), ...input.own, ...more };
  const body = { model, ...input.fields, ...decoding(), stream: true, outrider: options };
  showRequest(input.path, body);
  panel.began = performance.now();
  let end = null;
  live = { id: "", way: of, cut: body.outrider.net === "cut" };
  setRun(live);
  const own = live;
  const begun = (id) => { own.id = id; };
  try {
    for await (const chunk of chunks(input.path, { key, signal, begun, body: JSON.stringify(body) })) {
      const about = chunk.outrider || {};
      if (about.tokens) panel.take(about.tokens);
      if (about.stats) end = about;
    }
  } catch (problem) {
    if (problem.name === "AbortError") panel.stopped();
    else panel.fail(problem.message);
    throw problem;
  } finally {
    if (live === own) {
      live = null;
      setRun(null);
    }
  }
  panel.finish(end);
}

function runOne() {
  return guarded(async (signal) => {
    const input = await asked();
    signal.throwIfAborted(); // another run has taken the place meanwhile
    decoding();
    const panel = new Panel(`${TITLES[way()]}: ${input.about}`, "", shownGate(way()), way());
    open([panel], false);
    await stream(panel, input, way(), signal);
    by("said").textContent = `${panel.tokens.text} (${panel.end.guarantee}. ${panel.meaning})`;
  });
}

// Comparing -----------------------------------------------------------------------------------------------------

const ORDER = ["cloud-only", "edge-only", "speculative"]; // the others are compared with the cloud's text

function runAll() {
  return guarded(async (signal) => {
    const input = await asked();
    signal.throwIfAborted(); // another run has taken the place meanwhile
    const about = { speculative: `Together, gate ${choice("speculative").gate}` };
    const made = Object.fromEntries(["edge-only", "speculative", "cloud-only"].filter(works).map((of) => {
      return [of, new Panel(about[of] || TITLES[of], "waiting for its turn", shownGate(of), of)];
    }));
    open(Object.values(made), true);
    for (const of of ORDER.filter(works)) {
      say(`Running one after another, so that their times compare: ${TITLES[of].toLowerCase()}`);
      made[of].state("running");
      await streamOrSay(made[of], input, of, signal);
    }
    compareAll(made);
  });
}

/** A column that fails says so itself, and the others go on. */
async function streamOrSay(panel, input, of, signal) {
  const anew = { cache_salt: `${of} ${Date.now()}` }; // else the later runs would find the prompt of the first computed
  try {
    await stream(panel, input, of, signal, anew);
  } catch (problem) {
    if (problem.name === "AbortError" || problem.status === 401) throw problem;
  }
}

function compareAll(made) {
  const cloud = made["cloud-only"];
  const said = [];
  for (const of of ["edge-only", "speculative"].filter(works)) {
    const panel = made[of];
    if (!panel.end || !cloud.end) continue;
    const same = agreement(panel.tokens, cloud.tokens);
    const words = `${same} of ${panel.tokens.list.length} tokens as the cloud alone writes them`;
    panel.draw();
    panel.state(words);
    if (of === "speculative") panel.gained(gainBeside(panel, cloud, same));
    said.push(`${panel.title}: ${words}.`);
  }
  if (cloud.end) cloud.state(`${cloud.tokens.list.length} tokens, which the others are compared with`);
  by("said").textContent = said.join(" ");
}

function showRequest(path, body) {
  const short = JSON.stringify(body, (name, value) => {
    return name === "data" && value.length > 60 ? `${value.slice(0, 40)}… (${value.length} characters)` : value;
  }, 2);
  by("sent").hidden = false;
  by("sent-body").textContent = `POST ${new URL(path, document.baseURI).pathname}\n${short}`;
}

// The connection to the cloud -----------------------------------------------------------------------------------

/** Check whether the cloud is reachable. An unreachable gateway is reported at the next run. */
async function look() {
  try {
    const health = await (await reach("health", {})).json();
    setTrouble(health.status === "degraded" ? health.reason : "");
  } catch (problem) {
    if (!(problem instanceof Refusal)) throw problem;
  }
}

/** Cutting the cable cuts the run in progress, too. */
async function cutRun() {
  if (!by("cut").checked || !live || !live.id || live.way === "edge-only" || live.cut) return;
  const own = live;
  try {
    await reach(`v1/outrider/cut/${own.id}`, { key, method: "POST" });
    own.cut = true;
    if (live === own) setRun(own);
  } catch (problem) {
    if (live === own) failed(problem); // else the run has ended meanwhile
  }
}

by("cut").addEventListener("change", cutRun);
setInterval(() => document.hidden || look(), LOOK_MS);

// Keys and buttons ----------------------------------------------------------------------------------------------

function stop() {
  if (running) running.abort();
}

by("run").addEventListener("click", runOne);
by("again").addEventListener("click", runOne);
by("compare").addEventListener("click", runAll);
by("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => {
  const field = event.target.matches("input:not([type=checkbox], [type=radio], [type=file], #key)");
  if (event.key === "Enter" && !event.isComposing && (event.ctrlKey || event.metaKey || field)) {
    event.preventDefault();
    runOne();
  } else if (event.key === "Escape") {
    if (isShown()) hide();
    else stop();
  }
});
refresh();
start();
look();
