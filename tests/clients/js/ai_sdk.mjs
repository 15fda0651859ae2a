// Vercel's AI SDK with its provider for OpenAI-compatible servers.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { PARAMETERS, serve, weather } from "./protocol.mjs";

function call(task, options = {}) {
  const provider = createOpenAICompatible({
    name: "outrider",
    baseURL: task.url,
    apiKey: task.key,
    includeUsage: true,
  });
  const sound = { type: "file", data: task.sound, mediaType: "audio/wav" };
  const content = task.sound ? [{ type: "text", text: task.prompt }, sound] : task.prompt;
  const messages = [{ role: "user", content }];
  const limits = { maxOutputTokens: task.max_tokens, maxRetries: 0 };
  return { model: provider(task.model), messages, ...limits, ...options };
}

const usage = (reported) => [reported.inputTokens, reported.outputTokens];

// Errors of a stream go to onError. Without it they are printed, and the stream ends.
function stream(task, options = {}) {
  let failure;
  const result = streamText(call(task, { ...options, onError: ({ error }) => (failure = error) }));
  const checked = async () => {
    let text = "";
    for await (const delta of result.textStream) text += delta;
    if (failure) throw failure;
    return text;
  };
  return { result, checked };
}

function looping(task) {
  const description = "Return the weather of a city.";
  const tools = { weather: tool({ description, inputSchema: jsonSchema(PARAMETERS), execute: weather }) };
  const prepareStep = ({ stepNumber }) => (task.call_once && stepNumber ? { toolChoice: "none" } : {});
  return { tools, prepareStep, stopWhen: stepCountIs(3) };
}

const calls = (steps) => steps.flatMap((step) => step.toolCalls.map((each) => [each.toolName, each.input]));

await serve({
  async models(task) {
    // The SDK has no list of models, so applications fetch it.
    const answer = await fetch(`${task.url}/models`, { headers: { Authorization: `Bearer ${task.key}` } });
    return (await answer.json()).data.map((model) => model.id);
  },

  async chat(task) {
    const answer = await generateText(call(task));
    return { text: answer.text, usage: usage(answer.usage) };
  },

  async stream(task) {
    const { result, checked } = stream(task);
    const text = await checked();
    return { text, usage: usage(await result.usage) };
  },

  async cancel(task) {
    const abort = new AbortController();
    const { result } = stream(task, { abortSignal: abort.signal });
    for await (const delta of result.textStream) {
      abort.abort();
      return delta;
    }
  },

  async tools(task) {
    const answer = await generateText(call(task, looping(task)));
    return { calls: calls(answer.steps), answer: answer.text };
  },

  async stream_tools(task) {
    const { result, checked } = stream(task, looping(task));
    await checked();
    return { calls: calls(await result.steps), answer: await result.text };
  },
});
