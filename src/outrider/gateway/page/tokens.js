// The tokens of one run, and the strip that shows them.

export const NAMES = {
  edge: "edge, unverified",
  sampled: "edge, drawn to leave a loop",
  accepted: "drafted, verified",
  correction: "corrected by the cloud",
  bonus: "bonus from the cloud",
};
export const SOURCES = Object.keys(NAMES);
const EMPTY = "◌"; // stands for a token without a text of its own

/** What is known of each token. A revised token voids every token behind it. */
export class Tokens {
  constructor() {
    this.list = [];
    this.changed = 0; // the first token that has not been drawn as it is
  }

  take({ kind, index, id, text, source, signals }) {
    if (index > this.list.length) throw new Error(`token ${index + 1} came before token ${this.list.length + 1}`);
    const old = this.list[index];
    if (kind === "revised") this.list.length = index;
    const known = signals || (old && old.signals) || null; // a correction has none: those of the draft it replaces
    const token = { id, text, source, settled: kind !== "provisional", signals: known };
    if (old && old.id !== id) token.draft = old.text || EMPTY;
    else if (old && old.draft) token.draft = old.draft;
    this.list[index] = token;
    this.changed = Math.min(this.changed, index);
  }

  /** The output is complete: what is still provisional is void. */
  close() {
    const open = this.list.findIndex((token) => !token.settled);
    if (open < 0) return;
    this.list.length = open;
    this.changed = Math.min(this.changed, open);
  }

  counts() {
    const counts = Object.fromEntries(SOURCES.map((source) => [source, 0]));
    for (const token of this.list) if (token.settled) counts[token.source] += 1;
    return counts;
  }

  get text() {
    return this.list.filter((token) => token.settled).map((token) => token.text).join("");
  }
}

function classes(token) {
  const kind = token.settled ? token.source[0] : "p";
  return `t ${kind}${token.text ? "" : " v"}${token.differs ? " d" : ""}`;
}

/** Draws tokens into an element; only what has changed. One stop of the Tab key, then the arrow keys. */
export class Strip {
  constructor(element, tokens) {
    this.element = element;
    this.tokens = tokens;
    element.strip = this;
  }

  render() {
    const { list, changed } = this.tokens;
    const spans = this.element.children;
    while (spans.length > list.length) this.element.lastElementChild.remove();
    const fresh = document.createDocumentFragment();
    for (let n = changed; n < list.length; n += 1) {
      const span = spans[n] || fresh.appendChild(this.#span(n));
      this.#fill(span, list[n]);
    }
    this.element.append(fresh);
    this.tokens.changed = list.length;
    if (spans.length && !this.element.querySelector('[tabindex="0"]')) spans[0].tabIndex = 0;
  }

  #span() {
    const span = document.createElement("span");
    span.tabIndex = -1;
    return span;
  }

  #fill(span, token) {
    const text = token.text || EMPTY;
    if (span.textContent !== text) span.textContent = text;
    const name = classes(token);
    if (span.className !== name) span.className = name;
  }

  /** Lines that say all of the n-th token. */
  about(n) {
    const token = this.tokens.list[n];
    if (!token) return [];
    const lines = [`token ${n + 1}, id ${token.id}`, token.settled ? NAMES[token.source] : "drafted, not yet decided"];
    if (token.draft !== undefined) lines.push(`the edge had drafted “${token.draft}”`);
    if (token.differs) lines.push("the cloud alone writes another token here");
    const signals = Object.entries(token.signals || {}).map(([name, value]) => `${name} ${value.toPrecision(3)}`);
    return signals.length ? [...lines, signals.join(" · ")] : lines;
  }
}

/** Mark the tokens that are not in the longest common part with what the cloud wrote; returns how many are in it. */
export function agreement(tokens, reference) {
  const a = tokens.list.map((token) => token.id);
  const b = reference.list.map((token) => token.id);
  const kept = common(a, b);
  tokens.list.forEach((token, n) => { token.differs = !kept.has(n); });
  tokens.changed = 0;
  return kept.size;
}

const MOST = 4e6; // cells of the table; beyond, only the common beginning and end are compared

function common(a, b) {
  const kept = new Set();
  let start = 0;
  let enda = a.length;
  let endb = b.length;
  while (start < enda && start < endb && a[start] === b[start]) kept.add(start++);
  while (enda > start && endb > start && a[enda - 1] === b[endb - 1]) { kept.add(--enda); endb -= 1; }
  const rows = enda - start;
  const columns = endb - start;
  if (rows * columns > MOST) return kept;
  const width = columns + 1;
  const longest = new Uint16Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i -= 1)
    for (let j = columns - 1; j >= 0; j -= 1)
      longest[i * width + j] = a[start + i] === b[start + j]
        ? longest[(i + 1) * width + j + 1] + 1
        : Math.max(longest[(i + 1) * width + j], longest[i * width + j + 1]);
  for (let i = 0, j = 0; i < rows && j < columns;) {
    if (a[start + i] === b[start + j]) { kept.add(start + i); i += 1; j += 1; }
    else if (longest[(i + 1) * width + j] >= longest[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return kept;
}
