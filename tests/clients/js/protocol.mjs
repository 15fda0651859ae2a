// The loop of a driver in JavaScript: tests/clients/drivers/protocol.py describes it.

import { createInterface } from "node:readline";

const WEATHER = { Rome: "warm and 31 degrees", Oslo: "cold and 3 degrees" };
export const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

export function weather({ city }) {
  return WEATHER[city];
}

/** Run tasks until stdin ends. */
export async function serve(driver) {
  for await (const line of createInterface({ input: process.stdin })) {
    const task = { model: "outrider", max_tokens: 12, prompt: "", ...JSON.parse(line) };
    let answer;
    try {
      answer = await driver[task.do](task);
    } catch (error) {
      answer = { error: describe(error) };
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
}

function describe(error) {
  const classes = [];
  for (let kind = error.constructor; kind?.name; kind = Object.getPrototypeOf(kind)) classes.push(kind.name);
  return { classes, status: error.status ?? error.statusCode ?? null, message: String(error.message) };
}
