// The client `openai` for JavaScript.

import OpenAI from "openai";
import { PARAMETERS, serve, weather } from "./protocol.mjs";

function client(task) {
  return new OpenAI({ baseURL: task.url, apiKey: task.key, maxRetries: 0 });
}

function request(task) {
  const part = { type: "input_audio", input_audio: { data: task.sound, format: "wav" } };
  const content = task.sound ? [{ type: "text", text: task.prompt }, part] : task.prompt;
  return { model: task.model, messages: [{ role: "user", content }], max_tokens: task.max_tokens };
}

const usage = (reported) => [reported.prompt_tokens, reported.completion_tokens];

// runTools calls the function, and sends its result until the model answers.
async function loop(task, stream) {
  const tool = {
    type: "function",
    function: {
      name: "weather",
      description: "Return the weather of a city.",
      parameters: PARAMETERS,
      parse: JSON.parse,
      function: weather,
    },
  };
  const runner = client(task).chat.completions.runTools({ ...request(task), tools: [tool], stream });
  const calls = [];
  runner.on("functionToolCall", (call) => calls.push([call.name, JSON.parse(call.arguments)]));
  return { answer: await runner.finalContent(), calls };
}

await serve({
  async models(task) {
    const listed = [];
    for await (const model of client(task).models.list()) listed.push(model.id);
    return listed;
  },

  async chat(task) {
    const answer = await client(task).chat.completions.create(request(task));
    return { text: answer.choices[0].message.content, usage: usage(answer.usage) };
  },

  async stream(task) {
    const options = { stream: true, stream_options: { include_usage: true } };
    let text = "";
    let last;
    for await (const chunk of await client(task).chat.completions.create({ ...request(task), ...options })) {
      text += chunk.choices[0]?.delta.content ?? "";
      last = chunk;
    }
    return { text, usage: usage(last.usage) };
  },

  async cancel(task) {
    const stream = await client(task).chat.completions.create({ ...request(task), stream: true });
    for await (const chunk of stream) {
      if (!chunk.choices[0].delta.content) continue;
      stream.controller.abort();
      return chunk.choices[0].delta.content;
    }
  },

  tools: (task) => loop(task, false),
  stream_tools: (task) => loop(task, true),
});
