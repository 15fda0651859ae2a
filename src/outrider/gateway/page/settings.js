// The controls: filled from what the gateway says of itself, read when a run begins.

const RANGES = { // of the thresholds: [highest, step, where a person begins]
  // At these the bundled pair asks the cloud for one block in six; entropy's is the one that the documentation shows.
  entropy: [4, 0.05, 0.3], margin: [1, 0.01, 0.8], maxprob: [1, 0.01, 0.1], logprob: [6, 0.05, 0.1],
};
const HELP = {
  entropy: "A lower threshold verifies more blocks.", maxprob: "A lower threshold verifies more blocks.",
  logprob: "A lower threshold verifies more blocks.", margin: "A higher threshold verifies more blocks.",
};
const RTTS = ["", "10ms", "50ms", "100ms", "200ms", "500ms"];
const BANDWIDTHS = ["", "50Mbit", "10Mbit", "2Mbit", "500kbit", "64kbit"];
const DECODING = { max_new_tokens: "max-tokens", temperature: "temperature", seed: "seed" };
const ALONE = { gate: "always", accept: "exact", scope: "block", driver: "sequential", net: "none" };

const by = (id) => document.getElementById(id);
const radio = (name) => document.querySelector(`input[name="${name}"]:checked`);
const words = (text) => text.replace(/([\d.]+)(\D+)/, "$1 $2").replace("bit", "bit/s");

let defaults = {};
let can = { edge: true, alone: true, gates: true, cloud: true, networks: true, cut: true };
let trouble = ""; // the gateway's reason while the cloud cannot be used
let live = null; // {way, cut} of the run in progress
let rest = []; // network conditions of the gateway's own that have no control here

function option(value, text) {
  return new Option(text, value);
}

/** Fill the controls. info: what GET v1/outrider says. */
export function fill(info) {
  defaults = info.defaults || {};
  can = { edge: info.edge !== "none", cloud: info.cloud !== "none", networks: info.networks && info.cloud !== "none" };
  can.cut = can.networks && info.cut;
  can.alone = can.edge && info.drafter !== "lookup";
  can.gates = info.drafter === "model";
  by("signal").replaceChildren(...info.signals.map((name) => option(name, name)));
  fillGate(defaults.gate || "always");
  fillNetwork(defaults.net || "none");
  by("k").value = defaults.k || 5;
  by("driver").value = defaults.driver || "sequential";
  by("privacy").value = defaults.privacy || "audio";
  for (const [name, id] of Object.entries(DECODING)) by(id).value = info.settings[name] ?? by(id).value;
  document.querySelector(`input[name="way"][value="${firstWay()}"]`).checked = true;
  refresh();
}

function firstWay() {
  if (!can.cloud) return "edge-only";
  if (!can.edge) return "cloud-only";
  return defaults.way || "speculative";
}

function fillGate(gate) {
  const found = /^(trigger:)?(entropy|margin|maxprob|logprob)(\.mean|\.max)?:([\d.]+)$/.exec(gate);
  if (found) {
    by("gate").value = "signal";
    by("trigger").checked = Boolean(found[1]);
    by("signal").value = found[2];
    by("over").value = found[3] === ".mean" ? ".mean" : "";
    range(found[2], Number(found[4]));
    return;
  }
  range(by("signal").value, null);
  if (gate !== "always" && gate !== "never") by("gate").add(option(`as:${gate}`, gate));
  by("gate").value = gate === "always" || gate === "never" ? gate : `as:${gate}`;
}

function range(signal, value) {
  const [most, step, begin] = RANGES[signal] || [4, 0.05, 1];
  const slider = by("threshold");
  slider.min = 0;
  slider.max = Math.max(most, value || 0);
  slider.step = value === null ? step : "any"; // a threshold of the gateway's own stays what it is until it is moved
  slider.value = value === null ? begin : value;
}

function fillNetwork(net) {
  const parts = net === "none" ? [] : net.split(",");
  const pick = (key) => (parts.find((part) => part.startsWith(`${key}=`)) || "").slice(key.length + 1);
  rest = parts.filter((part) => !/^(rtt|bw)=/.test(part) && part !== "cut");
  list("rtt", RTTS, pick("rtt"), "none added");
  list("bandwidth", BANDWIDTHS, pick("bw"), "unlimited");
  by("cut").checked = can.cut && parts.includes("cut");
}

function list(id, choices, chosen, none) {
  const all = choices.includes(chosen) ? choices : [...choices, chosen];
  by(id).replaceChildren(...all.map((value) => option(value, value ? words(value) : none)));
  by(id).value = chosen;
}

export const canTogether = () => can.edge && can.cloud;
export const way = () => radio("way").value;

function gateText() {
  const kind = by("gate").value;
  if (kind.startsWith("as:")) return kind.slice(3);
  if (kind !== "signal") return kind;
  const limit = Number(Number(by("threshold").value).toFixed(4));
  return `${by("trigger").checked ? "trigger:" : ""}${by("signal").value}${by("over").value}:${limit}`;
}

/** What the line under the text shows for a run of this way. */
export function shownGate(of) {
  const drawn = of === "speculative" && by("gate").value === "signal";
  const signal = by("signal").value || "entropy";
  const threshold = drawn ? Number(Number(by("threshold").value).toFixed(4)) : null;
  return { signal, threshold, mean: drawn && by("over").value === ".mean" };
}

function network() {
  const parts = [];
  if (by("rtt").value) parts.push(`rtt=${by("rtt").value}`);
  if (by("bandwidth").value) parts.push(`bw=${by("bandwidth").value}`);
  return [...parts, ...rest].join(",") || "none";
}

/** The `outrider` object of a request. */
export function choice(of) {
  const asked = { way: of, provisional: true, tokens: true };
  if (of === "edge-only") return { ...asked, ...ALONE, privacy: "audio" };
  const common = { ...asked, privacy: by("privacy").value };
  if (can.networks) common.net = by("cut").checked ? "cut" : network();
  if (of === "cloud-only") return { ...common, ...ALONE, net: common.net || "none" };
  const together = { ...common, gate: gateText(), k: blockLength(), driver: by("driver").value };
  if (can.networks) together.on_cloud_loss = (!by("cut").checked && defaults.on_cloud_loss) || (can.alone ? "edge-only" : "fail");
  return together;
}

function blockLength() {
  const text = by("k").value.trim();
  const count = Number(text);
  if (text === "auto" || (Number.isInteger(count) && count >= 1 && count <= 64)) return text === "auto" ? text : count;
  throw new Error(`Tokens per block (k) is 1 to 64, or auto, not “${text}”.`);
}

/** The fields that OpenAI has. */
export function decoding() {
  const read = { max_tokens: "max-tokens", temperature: "temperature", seed: "seed" };
  return Object.fromEntries(Object.entries(read).map(([name, id]) => [name, number(id)]));
}

function number(id) {
  const field = by(id);
  if (field.value !== "" && field.validity.valid) return Number(field.value);
  if (field.value !== "" && field.validity.stepMismatch && id === "temperature") return Number(field.value);
  throw new Error(`${field.labels[0].textContent.trim()} is a number of ${field.min} or more.`);
}

/** Show what belongs together, say what cannot work and why, and draw the way to the cloud. */
export function refresh() {
  reason("way-reason", wayReason());
  for (const one of document.querySelectorAll('input[name="way"]')) one.disabled = !works(one.value);
  const together = way() === "speculative";
  by("threshold-part").hidden = by("gate").value !== "signal";
  by("threshold-said").textContent = Number(by("threshold").value).toFixed(2);
  by("threshold-help").textContent = HELP[by("signal").value] || "";
  for (const one of by("speculation").querySelectorAll("input, select")) one.disabled = !together;
  by("gate").disabled = by("gate").disabled || !can.gates;
  reason("speculation-reason", speculationReason(together));
  refreshNetwork();
}

function speculationReason(together) {
  if (!canTogether()) return "These are about edge and cloud together, which this gateway cannot run.";
  if (!together) return "These are about edge and cloud together: choose Together to use them.";
  return can.gates ? "" : "This gateway uses prompt lookup, which has no confidence for a gate: every block is verified.";
}

export const works = (of) => (of === "edge-only" ? can.alone : of === "cloud-only" ? can.cloud : can.edge && can.cloud);

function wayReason() {
  if (!can.cloud) return "This gateway was started without a cloud: the edge writes alone.";
  if (!can.edge) return "This gateway was started without an edge model: the cloud writes alone.";
  return can.alone ? "" : "This gateway drafts by prompt lookup, without a model: the edge cannot write alone.";
}

function refreshNetwork() {
  const alone = way() === "edge-only";
  for (const id of ["rtt", "bandwidth"]) by(id).disabled = alone || !can.networks;
  by("cut").disabled = alone || !can.cut;
  if (!alone && by("cut").checked) by("rtt").disabled = by("bandwidth").disabled = true;
  by("privacy").disabled = alone;
  by("driver").disabled = by("driver").disabled || !can.networks;
  const refused = can.cloud && !can.networks;
  reason("driver-reason", refused ? "Pipelined needs one of Outrider's clouds, across a network." : "");
  reason("network-reason", networkReason(alone));
  drawPath(alone);
}

function networkReason(alone) {
  if (!can.cloud) return "Without a cloud there is no network to simulate.";
  if (!can.networks) return "The way to this gateway's cloud cannot be simulated.";
  if (alone) return "The edge alone uses no network.";
  const said = can.cut ? [] : ["The cable can only be cut to one of Outrider's clouds."];
  if (rest.length) said.push(`Also, as the gateway was started: ${rest.join(", ")}.`);
  return said.join(" ");
}

/** Set the reason while the cloud is unreachable, else "". */
export function setTrouble(reason) {
  trouble = reason;
  drawPath(way() === "edge-only");
}

/** Set the run in progress, {way, cut}, or null. */
export function setRun(run) {
  live = run;
  drawPath(way() === "edge-only");
}

/** The connection to the cloud: red while the cloud is unreachable, or disconnected from the run in progress. */
function drawPath(alone) {
  const [state, text] = pathState(alone);
  by("path").dataset.state = state;
  by("path-net").textContent = text;
  by("path-net").title = state === "away" ? trouble : "";
}

function pathState(alone) {
  const added = [by("rtt").value, by("bandwidth").value].filter(Boolean).map(words).join(", ");
  const open = can.networks ? added || "no delay added" : "";
  const unused = live ? live.way === "edge-only" : alone;
  if (!can.cloud) return ["unused", unused ? "not used" : open];
  if (trouble) return ["away", "cloud not usable"];
  if (unused) return ["unused", "not used"];
  if (live) return live.cut ? ["cut", "cable cut"] : ["up", open];
  return by("cut").checked && can.networks ? ["planned", "to be cut in the next run"] : ["up", open];
}

function reason(id, text) {
  by(id).textContent = text;
  by(id).hidden = !text;
}

by("settings").addEventListener("input", (event) => {
  if (event.target.id === "signal") range(event.target.value, null);
  if (event.target.id === "threshold") by("threshold").step = (RANGES[by("signal").value] || [0, 0.05])[1];
  refresh();
});
