// Calls of npm packages against a server: node call_npm.mjs PACKAGE URL MODEL KEY LIMITED_KEY FOLDER; as call_clients.py.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { join } from "node:path";

const [client, url, model, key, limitedKey, folder] = process.argv.slice(2);
const require = createRequire(join(folder, "package.json"));
const load = async (name) => import(pathToFileURL(require.resolve(name)).href);
const versionOf = (name) => JSON.parse(readFileSync(join(folder, "node_modules", name, "package.json"))).version;

const PROMPT = "def read(path):";
const TOKENS = 200;
const CITY = {
  type: "object",
  properties: { name: { type: "string", enum: ["Rome", "Oslo"] }, size: { type: "integer", minimum: 0, maximum: 9 } },
  required: ["name", "size"],
  additionalProperties: false,
};
const TOO_LONG = "x = 1\n".repeat(2000);

const need = (value) => { if (!value) throw new Error("the answer is empty"); };
const checkCity = (city) => {
  if (!["Rome", "Oslo"].includes(city.name) || !(city.size >= 0 && city.size <= 9)) throw new Error(JSON.stringify(city));
};
const checkUsage = (...counts) => { if (!counts.every((count) => count > 0)) throw new Error(`usage ${counts}`); };
const refused = async (call, text) => {
  try {
    await call();
  } catch (error) {
    const said = `${error} ${error.cause ?? ""} ${error.responseBody ?? ""}`;
    if (!said.includes(text)) throw new Error(`the error does not say ${text}: ${said}`);
    return;
  }
  throw new Error("the call is not refused");
};
const clientsLeft = async () => {
  const lines = (await (await fetch(`${url}/metrics`)).text()).split("\n");
  return lines.filter((line) => line.startsWith("ingot_clients_left_total{"))
    .reduce((sum, line) => sum + Number(line.split(" ").pop()), 0);
};
const cancelled = async (begin) => {
  for (let attempt = 0; attempt < 6; attempt += 1) {
    const before = await clientsLeft();
    await begin();
    for (const until = Date.now() + 2000; Date.now() < until;) {
      if (await clientsLeft() > before) return;
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  }
  throw new Error("the server has not noticed that the client left");
};

const aiCalls = async () => {
  const ai = await load("ai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const providerOf = (apiKey) => createOpenAICompatible({
    name: "ingot", baseURL: `${url}/v1`, apiKey, supportsStructuredOutputs: true, includeUsage: true,
  });
  const given = { model: providerOf(key)(model), prompt: PROMPT, maxOutputTokens: TOKENS, maxRetries: 0 };
  const slow = { ...given, model: providerOf(limitedKey)(model) };
  const city = ai.jsonSchema(CITY);
  return {
    chat: async () => need((await ai.generateText(given)).text),
    stream: async () => {
      let text = "";
      for await (const piece of ai.streamText(given).textStream) text += piece;
      need(text);
    },
    tools: async () => {
      const tools = { add_city: ai.tool({ description: "Add a city.", inputSchema: city }) };
      checkCity((await ai.generateText({ ...given, tools, toolChoice: "required" })).toolCalls[0].input);
    },
    structured: async () => checkCity((await ai.generateObject({ ...given, schema: city })).object),
    usage: async () => {
      const { usage } = await ai.generateText(given);
      checkUsage(usage.inputTokens, usage.outputTokens, usage.totalTokens);
    },
    "unknown model": async () => refused(
      () => ai.generateText({ ...given, model: providerOf(key)("unknown-model") }), "does not exist"),
    "too long": async () => refused(() => ai.generateText({ ...given, prompt: TOO_LONG }), "maximum context length"),
    "rate limit": async () => refused(async () => {
      await ai.generateText(slow);
      await ai.generateText(slow);
    }, "Rate limit reached"),
    embeddings: async () => refused(
      () => ai.embed({ model: providerOf(key).textEmbeddingModel(model), value: "a", maxRetries: 0 }),
      "Ingot generates text"),
    cancel: async () => cancelled(async () => {
      const leave = new AbortController();
      const pieces = ai.streamText({ ...given, maxOutputTokens: 900, abortSignal: leave.signal }).textStream;
      for await (const piece of pieces) if (piece) break;
      leave.abort();
    }),
  };
};

const openaiCalls = async () => {
  const { default: OpenAI } = await load("openai");
  const clientOf = (apiKey) => new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
  const openai = clientOf(key);
  const slow = clientOf(limitedKey);
  const given = { model, messages: [{ role: "user", content: PROMPT }], max_tokens: TOKENS };
  const create = (more = {}) => openai.chat.completions.create({ ...given, ...more });
  const tool = { type: "function", function: { name: "add_city", description: "Add a city.", parameters: CITY } };
  return {
    chat: async () => need((await create()).choices[0].message.content),
    stream: async () => {
      let text = "";
      for await (const piece of await create({ stream: true })) text += piece.choices[0]?.delta.content ?? "";
      need(text);
    },
    tools: async () => {
      const answer = await create({ tools: [tool], tool_choice: "required" });
      checkCity(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
    },
    structured: async () => {
      const form = { type: "json_schema", json_schema: { name: "city", schema: CITY, strict: true } };
      checkCity(JSON.parse((await create({ response_format: form })).choices[0].message.content));
    },
    usage: async () => {
      const { usage } = await create();
      checkUsage(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens);
    },
    "unknown model": async () => refused(() => create({ model: "unknown-model" }), "does not exist"),
    "too long": async () => refused(
      () => create({ messages: [{ role: "user", content: TOO_LONG }] }), "maximum context length"),
    "rate limit": async () => refused(async () => {
      await slow.chat.completions.create(given);
      await slow.chat.completions.create(given);
    }, "Rate limit reached"),
    embeddings: async () => refused(() => openai.embeddings.create({ model, input: "a" }), "Ingot generates text"),
    cancel: async () => cancelled(async () => {
      const pieces = await create({ stream: true, max_tokens: 900 });
      for await (const piece of pieces) if (piece.choices.length) break;
      pieces.controller.abort();
    }),
    responses: async () => need(
      (await openai.responses.create({ model, input: PROMPT, max_output_tokens: TOKENS })).output_text),
  };
};

const anthropicCalls = async () => {
  const { default: Anthropic } = await load("@anthropic-ai/sdk");
  const clientOf = (apiKey) => new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
  const anthropic = clientOf(key);
  const slow = clientOf(limitedKey);
  const given = { model, messages: [{ role: "user", content: PROMPT }], max_tokens: TOKENS };
  const create = (more = {}) => anthropic.messages.create({ ...given, ...more });
  return {
    chat: async () => need((await create()).content[0].text),
    stream: async () => need(await anthropic.messages.stream(given).finalText()),
    tools: async () => {
      const tool = { name: "add_city", description: "Add a city.", input_schema: CITY };
      const answer = await create({ tools: [tool], tool_choice: { type: "any" } });
      checkCity(answer.content.find((block) => block.type === "tool_use").input);
    },
    usage: async () => {
      const { usage } = await create();
      checkUsage(usage.input_tokens, usage.output_tokens);
    },
    "unknown model": async () => refused(() => create({ model: "unknown-model" }), "does not exist"),
    "too long": async () => refused(
      () => create({ messages: [{ role: "user", content: TOO_LONG }] }), "maximum context length"),
    "rate limit": async () => refused(async () => {
      await slow.messages.create(given);
      await slow.messages.create(given);
    }, "Rate limit reached"),
    cancel: async () => cancelled(async () => {
      const pieces = await create({ stream: true, max_tokens: 900 });
      for await (const piece of pieces) if (piece.type === "content_block_delta") break;
      pieces.controller.abort();
    }),
  };
};

const CLIENTS = { ai: aiCalls, openai: openaiCalls, "@anthropic-ai/sdk": anthropicCalls };
const found = {};
let calls = {};
try {
  calls = await CLIENTS[client]();
  found.version = versionOf(client);
} catch (error) {
  if (error.code !== "MODULE_NOT_FOUND" && error.code !== "ERR_MODULE_NOT_FOUND") throw error;
  found.missing = String(error).split("\n")[0];
}
if (!found.missing) found.calls = {};
for (const [name, call] of Object.entries(calls)) {
  try {
    await call();
    found.calls[name] = "ok";
  } catch (error) {
    found.calls[name] = String(error).split("\n")[0].slice(0, 300);
  }
}
console.log(JSON.stringify(found));
