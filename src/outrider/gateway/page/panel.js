// One run on the page: its tokens, the line under them, what the result promises, and its meters.

import { gain } from "./gain.js";
import { meters, share } from "./meters.js";
import { Line } from "./line.js";
import { Strip, Tokens } from "./tokens.js";
import { hide, show } from "./tip.js";

const MEANINGS = {
  exact: "Every token is the cloud's own: the text is what the cloud alone would write.",
  bounded: "The gate left tokens to the edge, within the risk budget that it was calibrated for.",
  "best-effort": "Some tokens are the edge's own: the text may differ from what the cloud would write.",
  "edge-only": "The edge wrote this alone: the cloud decided none of it.",
};
const ENDS = {
  stop: "ended by itself", eos: "ended by itself", length: "cut at the most tokens", loop: "ended in a loop",
  sentences: "ended after its sentences",
};
const LOST = "The cloud could not be reached: the edge went on alone.";

/** gate: of the line under the text, see Line. way: of decoding. */
export class Panel {
  constructor(title, about, gate, way = "") {
    this.way = way;
    this.element = document.getElementById("panel").content.firstElementChild.cloneNode(true);
    this.title = title;
    this.tokens = new Tokens();
    this.part = (name) => this.element.querySelector(name);
    this.part("h3").textContent = title;
    this.part(".panel-state").textContent = about;
    const text = this.part(".strip");
    text.setAttribute("aria-label", `Tokens, ${title}: move with the arrow keys`);
    text.setAttribute("aria-busy", "true");
    this.strip = new Strip(text, this.tokens);
    this.line = new Line(this.part(".line"), this.tokens, gate);
    this.strip.pointed = (n) => this.line.point(n);
    this.#watchLine();
    this.frame = 0;
    this.first = this.last = 0; // ms, as the page saw the first and the last confirmed token
    this.began = performance.now();
  }

  /** Take the tokens of a chunk; they are drawn with the next frame. */
  take(events) {
    const now = performance.now();
    for (const event of events) {
      this.tokens.take(event);
      if (event.kind === "provisional") continue;
      this.first = this.first || now;
      this.last = now;
    }
    if (!this.frame) this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.strip.render();
    this.line.render();
    share(this.part(".share"), this.tokens.counts());
  }

  /** The figures as this page saw them. */
  seen() {
    const count = this.tokens.list.length;
    return {
      ttft: this.first ? (this.first - this.began) / 1000 : null,
      speed: count && this.last > this.began ? (count * 1000) / (this.last - this.began) : null,
    };
  }

  /** The output is complete. end: the `outrider` object of the last chunk. */
  finish(end) {
    this.end = end;
    this.tokens.close();
    this.draw();
    this.part(".strip").setAttribute("aria-busy", "false");
    const word = this.part(".word");
    word.textContent = end.guarantee;
    word.className = `word ${end.guarantee}`;
    this.part(".meaning").textContent = this.meaning;
    this.part(".verdict").hidden = false;
    this.gained(gain(this.way, end, this.tokens.list.length));
    this.warn(this.#warnings());
    meters(this.part(".meters"), end, this.seen(), this.tokens.list.length);
    this.state(`${this.tokens.list.length} tokens, ${ENDS[end.finish_reason] || end.finish_reason || "ended"}`);
  }

  /** Show the gain; "" shows nothing. */
  gained(words) {
    this.part(".gain").textContent = words;
    this.part(".gain").hidden = !words;
  }

  get meaning() {
    return this.end.stats.cloud_lost ? LOST : MEANINGS[this.end.guarantee] || "";
  }

  #warnings() {
    const { warnings, risk } = this.end;
    const lines = [...(warnings || [])];
    if (risk) {
      const share = (value) => `${(100 * value).toPrecision(2)} %`;
      const estimate = risk.estimate === null ? "no audit yet" : `audits put it at ${share(risk.estimate)}`;
      lines.push(`risk budget ${share(risk.budget)} of all ${risk.loss}; ${estimate}`);
    }
    return lines;
  }

  warn(lines) {
    const list = this.part(".warnings");
    list.hidden = !lines.length;
    list.replaceChildren(...lines.map((line) => Object.assign(document.createElement("li"), { textContent: line })));
  }

  /** It did not come to its end: by an error, said in words, or because it was stopped. */
  fail(words) {
    this.draw();
    this.part(".strip").setAttribute("aria-busy", "false");
    const fault = this.part(".fault");
    fault.textContent = words;
    fault.hidden = false;
    this.state("failed");
  }

  stopped() {
    this.draw();
    this.part(".strip").setAttribute("aria-busy", "false");
    this.state(`stopped after ${this.tokens.list.length} tokens`);
  }

  state(words) {
    this.part(".panel-state").textContent = words;
  }

  leave() {
    cancelAnimationFrame(this.frame);
    this.line.watch.disconnect();
  }

  #watchLine() {
    const drawing = this.line.svg;
    drawing.addEventListener("pointermove", (event) => {
      const n = this.line.nearest(event.clientX);
      const span = this.part(".strip").children[n];
      this.line.point(span ? n : -1);
      if (span) show(span, this.strip.about(n));
      else hide();
    });
    drawing.addEventListener("pointerleave", () => {
      this.line.point(-1);
      hide();
    });
  }
}
