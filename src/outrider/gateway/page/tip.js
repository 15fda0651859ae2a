// The small note that says all of a token, on hover, on focus, or from the line under the text.

const tip = document.getElementById("tip");
let shown = null;

export function show(of, lines) {
  hide();
  shown = of;
  tip.replaceChildren(...lines.map((line) => {
    const row = document.createElement("div");
    row.dir = "auto";
    row.textContent = line;
    return row;
  }));
  tip.hidden = false;
  place(of.getClientRects()[0] || of.getBoundingClientRect());
  of.classList.add("on");
  of.setAttribute("aria-describedby", "tip");
}

function place(box) {
  const own = tip.getBoundingClientRect();
  const wide = document.documentElement.clientWidth;
  const above = box.top - own.height - 8;
  tip.style.left = `${Math.max(8, Math.min(box.left + box.width / 2 - own.width / 2, wide - own.width - 8))}px`;
  tip.style.top = `${above > 8 ? above : box.bottom + 8}px`;
}

export function hide() {
  if (shown) {
    shown.removeAttribute("aria-describedby");
    shown.classList.remove("on");
  }
  shown = null;
  tip.hidden = true;
}

export const isShown = () => shown !== null;

const tokenAt = (event) => (event.target.closest ? event.target.closest(".strip > .t") : null);
const placeOf = (span) => Array.prototype.indexOf.call(span.parentElement.children, span);

function showToken(span) {
  const { strip } = span.parentElement;
  const n = placeOf(span);
  show(span, strip.about(n));
  if (strip.pointed) strip.pointed(n);
}

function leave() {
  if (shown && shown.parentElement && shown.parentElement.strip && shown.parentElement.strip.pointed)
    shown.parentElement.strip.pointed(-1);
  hide();
}

function follow(event) {
  const span = tokenAt(event);
  if (span) showToken(span);
  else if (!event.target.closest || !event.target.closest("svg")) leave();
}

function move(from, key) {
  const all = from.parentElement;
  const steps = {
    ArrowRight: from.nextElementSibling, ArrowLeft: from.previousElementSibling,
    Home: all.firstElementChild, End: all.lastElementChild,
  };
  if (!(key in steps)) return false;
  const to = steps[key];
  if (to) {
    const stop = all.querySelector('[tabindex="0"]');
    if (stop) stop.tabIndex = -1;
    to.tabIndex = 0;
    to.scrollIntoView({ block: "nearest" });
    to.focus({ preventScroll: true });
    showToken(to);
  }
  return true;
}

document.addEventListener("pointerover", follow);
document.addEventListener("focusin", follow);
document.addEventListener("focusout", leave);
document.addEventListener("scroll", () => {
  if (shown && shown === document.activeElement) showToken(shown);
  else leave();
}, { passive: true, capture: true });
document.addEventListener("keydown", (event) => {
  const span = tokenAt(event);
  if (span && move(span, event.key)) event.preventDefault();
});
