// Talking to the gateway: requests, OpenAI's errors in words, and server-sent events read by hand.

/** What the gateway, or the way to it, said no to. status: of HTTP, 0 where there was none. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const PLAIN = {
  401: "The gateway requires an API key.",
  404: "The gateway has no such address.",
  413: "The request is larger than the gateway takes.",
  429: "The gateway is busy: all its slots and its queue are full.",
  503: "The cloud cannot be reached.",
};

/** OpenAI's error object in words: what is wrong, and with which field. */
export function inWords(error, status) {
  const message = (error && error.message) || PLAIN[status] || `The gateway answered ${status}.`;
  return error && error.param && !message.includes(error.param) ? `${error.param}: ${message}` : message;
}

async function refusal(response) {
  let body = null;
  try {
    body = await response.json();
  } catch (problem) {
    if (!(problem instanceof SyntaxError)) throw problem; // a body that is no JSON says nothing
  }
  const wait = response.headers.get("Retry-After");
  const words = inWords(body && body.error, response.status);
  const again = wait ? `${/[.!?]$/.test(words) ? "" : "."} Try again in ${wait} s.` : "";
  return new Refusal(response.status, words + again);
}

/** Fetch from this gateway; the key, if there is one, goes along. Throws Refusal. */
export async function reach(path, { key = "", body = null, signal = null, method = body ? "POST" : "GET" } = {}) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body) headers["Content-Type"] = "application/json";
  const options = { method, headers, body, signal, credentials: "omit" };
  let response;
  try {
    response = await fetch(path, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refusal(0, "The gateway cannot be reached. Is outrider edge still running?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

/** The data of each event of a body. Chunks may end anywhere: inside a line, or inside a character. */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let held = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      const more = done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A \r at the end may be half of a \r\n, unless nothing follows.
      const lines = (held + more).split(done ? /\r\n|\n|\r/ : /\r\n|\n|\r(?!$)/);
      held = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => {}); // where it is closed or broken already, there is nothing to give up
  }
}

/** The chunks of a completion, to the end. options.begun: called with the request's id. Throws Refusal for an error on the way, or an end before its time. */
export async function* chunks(path, options) {
  const response = await reach(path, options);
  if (options.begun) options.begun(response.headers.get("X-Request-Id"));
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Refusal(response.status, inWords(chunk.error, response.status));
      yield chunk;
    }
  } catch (problem) {
    if (problem.name === "AbortError" || problem instanceof Refusal) throw problem;
    throw new Refusal(0, `The stream broke off: ${problem.message}`);
  }
  throw new Refusal(0, "The stream ended before the text was complete.");
}
