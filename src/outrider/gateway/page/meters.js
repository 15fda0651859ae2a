// Figures of a run: who decided how much, escalation, acceptance, bytes by kind, times.

import { NAMES, SOURCES } from "./tokens.js";

const SVG = "http://www.w3.org/2000/svg";

export function bytes(count) {
  if (count < 1000) return `${count} B`;
  const [value, unit] = count < 1e6 ? [count / 1e3, "kB"] : [count / 1e6, "MB"];
  return `${value < 100 ? value.toFixed(1) : value.toFixed(0)} ${unit}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${(value * 1000).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}

const rate = (value) => (value === null || !Number.isFinite(value) ? "–" : value.toFixed(value < 10 ? 1 : 0));
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(0)} %` : "–");

/** A bar of parts, [class, size]; as wide as its place. */
function bar(svg, parts, whole) {
  svg.setAttribute("viewBox", "0 0 100 1");
  svg.setAttribute("preserveAspectRatio", "none");
  let at = 0;
  svg.replaceChildren(...parts.filter(([, size]) => size).map(([name, size]) => {
    const width = (100 * size) / whole;
    const rect = document.createElementNS(SVG, "rect");
    const attributes = { class: name, x: at, y: 0, width, height: 1 };
    for (const [key, value] of Object.entries(attributes)) rect.setAttribute(key, value);
    at += width;
    return rect;
  }));
}

/** Who decided how many tokens: a bar, and the same in words. */
export function share(place, counts) {
  const whole = SOURCES.reduce((sum, source) => sum + counts[source], 0);
  place.hidden = !whole;
  if (!whole) return;
  const cloud = counts.accepted + counts.correction + counts.bonus;
  const names = SOURCES.filter((source) => counts[source]).map((source) => `${counts[source]} ${NAMES[source]}`);
  const words = place.querySelector("p");
  const said = `The cloud decided ${cloud} of ${whole} tokens (${percent(cloud, whole)}): ${names.join(" · ")}`;
  if (words.textContent !== said) words.textContent = said;
  bar(place.querySelector("svg"), SOURCES.map((source) => [source[0], counts[source]]), whole);
}

function tile(name, value, notes, parts, whole) {
  const tile = document.createElement("div");
  const add = (tag, words, kind) => {
    const made = tile.appendChild(document.createElement(tag));
    made.textContent = words;
    if (kind) made.className = kind;
  };
  add("dt", name);
  add("dd", value, "value");
  if (parts) {
    const svg = tile.appendChild(document.createElement("dd")).appendChild(document.createElementNS(SVG, "svg"));
    svg.setAttribute("aria-hidden", "true");
    bar(svg, parts, whole || 1);
  }
  for (const note of notes) add("dd", note, "note");
  return tile;
}

/** Bytes one way, by kind of frame; each with the colour of its part of the bar. */
function traffic(name, ledger) {
  const kinds = Object.entries(ledger).sort((a, b) => b[1] - a[1]);
  const whole = kinds.reduce((sum, [, size]) => sum + size, 0);
  const colours = kinds.map(([, size], n) => [`s${n % 8}`, size]);
  const made = tile(name, bytes(whole), kinds.length ? [] : ["nothing crossed a network"], colours, whole);
  kinds.forEach(([kind, size], n) => {
    const note = made.appendChild(document.createElement("dd"));
    note.className = "note kind";
    note.append(Object.assign(document.createElement("i"), { className: `s${n % 8}` }), `${kind} ${bytes(size)}`);
  });
  return made;
}

/** What an earlier run saved: tokens of the prompt that were neither sent nor computed again. */
function reused({ edge_cached_tokens: edge, cloud_cached_tokens: cloud }) {
  if (!edge && !cloud) return [];
  const sides = [[edge, "on the edge"], [cloud, "in the cloud"]].filter(([count]) => count);
  return [`prompt tokens kept from an earlier run: ${sides.map(([count, where]) => `${count} ${where}`).join(", ")}`];
}

/** end: the `outrider` object of the last chunk. seen: what the page measured. */
export function meters(place, end, seen, count) {
  const { stats } = end;
  const ledger = end.ledger || { up: {}, down: {} };
  const served = stats.total_s ? count / stats.total_s : null;
  place.replaceChildren(
    tile("Escalated", percent(stats.escalated, stats.blocks), [`${stats.escalated} of ${stats.blocks} blocks`],
      [["s0", stats.escalated]], stats.blocks),
    tile("Accepted", percent(stats.accepted, stats.verified), [`${stats.accepted} of ${stats.verified} verified drafts`],
      [["s2", Math.min(stats.accepted, stats.verified)]], stats.verified),
    tile("First token", seconds(seen.ttft), [`here; ${seconds(stats.ttft_s)} at the gateway`, ...reused(stats)]),
    tile("Tokens per second", rate(seen.speed), [`here; ${rate(served)} at the gateway`]),
    traffic("Sent up", ledger.up),
    traffic("Came down", ledger.down),
  );
  place.hidden = false;
}
