// How sure the edge was of each token, as a line under the text, with the gate's threshold where it has one.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 96;
const EDGE = { top: 8, bottom: 8, left: 34, right: 8 };
const MOST_DOTS = 240;
const FEWEST = 24; // tokens that the width is made for at least, so that a short text does not jump
const UNITS = { entropy: "nats", margin: "", maxprob: "", logprob: "nats" };
const MEANINGS = {
  entropy: "entropy of the edge's guess", margin: "margin between the edge's best two",
  maxprob: "1 − the edge's highest probability", logprob: "−log probability of the draft",
};

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** gate: {signal, threshold, mean} as asked for; threshold null where the gate has none. */
export class Line {
  constructor(figure, tokens, gate) {
    this.figure = figure;
    this.svg = figure.querySelector("svg");
    this.tokens = tokens;
    this.gate = gate;
    this.at = -1;
    figure.querySelector("figcaption").textContent = this.#caption();
    this.watch = new ResizeObserver(() => this.render());
    this.watch.observe(figure);
  }

  #caption() {
    const { signal, threshold, mean } = this.gate;
    const what = `Signal: ${MEANINGS[signal]}${UNITS[signal] ? `, in ${UNITS[signal]}` : ""}.`;
    if (threshold === null) return what;
    const side = signal === "margin" ? "below" : "above";
    return `${what} A block ${mean ? "whose mean is" : "with a token"} ${side} ${threshold} goes to the cloud.`;
  }

  values() {
    return this.tokens.list.map((token) => (token.signals ? token.signals[this.gate.signal] : null));
  }

  point(n) {
    if (n === this.at) return;
    this.at = n;
    this.render();
  }

  /** The token under a place of the drawing. */
  nearest(x) {
    const box = this.svg.getBoundingClientRect();
    const share = (x - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right);
    return Math.floor(share * Math.max(this.tokens.list.length, FEWEST));
  }

  render() {
    const values = this.values();
    const known = values.filter((value) => value !== null);
    this.figure.hidden = !known.length;
    const width = this.svg.clientWidth;
    if (!known.length || !width) return;
    const { threshold, signal } = this.gate;
    const bounded = signal === "margin" || signal === "maxprob";
    const highest = known.reduce((a, b) => Math.max(a, b), threshold === null ? 0 : threshold * 1.2);
    const scale = { width, top: bounded ? 1 : Math.max(highest, 0.1), count: Math.max(values.length, FEWEST) };
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("aria-label", this.#summary(known));
    const below = [...this.#axes(scale), ...this.#limit(scale)];
    this.svg.replaceChildren(...below, ...this.#curve(scale, values), ...this.#cursor(scale));
  }

  #summary(known) {
    const { signal, threshold } = this.gate;
    const low = known.reduce((a, b) => Math.min(a, b));
    const high = known.reduce((a, b) => Math.max(a, b));
    const over = known.filter((value) => (signal === "margin" ? value < threshold : value > threshold)).length;
    const past = threshold === null ? "" : `; ${over} past the threshold of ${threshold}`;
    return `${signal} of ${known.length} drafted tokens, from ${low.toPrecision(2)} to ${high.toPrecision(2)}${past}`;
  }

  #axes(scale) {
    const top = scale.top >= 10 ? scale.top.toFixed(0) : String(Number(scale.top.toPrecision(2)));
    const [x, right] = [EDGE.left - 6, scale.width - EDGE.right];
    return [
      node("line", { class: "grid", x1: EDGE.left, x2: right, y1: EDGE.top, y2: EDGE.top }),
      node("line", { class: "axis", x1: EDGE.left, x2: right, y1: y(scale, 0), y2: y(scale, 0) }),
      node("text", { class: "tick", x, y: EDGE.top }, top),
      node("text", { class: "tick", x, y: y(scale, 0) }, "0"),
    ];
  }

  #limit(scale) {
    const { threshold, signal } = this.gate;
    if (threshold === null) return [];
    const at = y(scale, Math.min(threshold, scale.top));
    const [from, to] = signal === "margin" ? [at, y(scale, 0)] : [EDGE.top, at];
    const right = scale.width - EDGE.right;
    const size = { width: right - EDGE.left, height: Math.max(to - from, 0) };
    return [
      node("rect", { class: "unsure", x: EDGE.left, y: from, ...size }),
      node("line", { class: "limit", x1: EDGE.left, x2: right, y1: at, y2: at }),
    ];
  }

  #curve(scale, values) {
    let path = "";
    let joined = false;
    values.forEach((value, n) => {
      if (value !== null) path += `${joined ? "L" : "M"}${x(scale, n).toFixed(1)} ${y(scale, value).toFixed(1)}`;
      joined = value !== null;
    });
    const drawn = [node("path", { class: "curve", d: path })];
    return values.length > MOST_DOTS ? drawn : [...drawn, ...this.#dots(scale, values)];
  }

  #dots(scale, values) {
    return this.tokens.list.flatMap((token, n) => {
      if (values[n] === null) return [];
      const kind = token.settled ? token.source[0] : "p";
      return [node("circle", { class: `dot ${kind}`, cx: x(scale, n), cy: y(scale, values[n]), r: 3 })];
    });
  }

  #cursor(scale) {
    if (this.at < 0 || this.at >= this.tokens.list.length) return [];
    const at = x(scale, this.at);
    return [node("line", { class: "cursor", x1: at, x2: at, y1: EDGE.top, y2: y(scale, 0) })];
  }
}

const x = (scale, n) => EDGE.left + ((n + 0.5) / scale.count) * (scale.width - EDGE.left - EDGE.right);
const y = (scale, value) => HEIGHT - EDGE.bottom - (value / scale.top) * (HEIGHT - EDGE.top - EDGE.bottom);
