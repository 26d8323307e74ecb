// Uses a server through the openai package for Node as its users do; any fault is an exception.
//
// NODE_PATH=.node-clients/node_modules node use_openai_node.cjs http://127.0.0.1:8000/v1 MODEL
const assert = require("node:assert");
const OpenAI = require("openai");

const tool = {
  name: "get_weather",
  description: "The weather in a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string", enum: ["Oslo", "Paris", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
  strict: true,
};

// Yields the pieces of an answer's text. Leaving the loop early closes the connection, and the server ends the request.
async function* streamChat(client, model, content) {
  const messages = [{ role: "user", content }];
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0, stream: true });
  for await (const chunk of stream) yield chunk.choices[0]?.delta.content ?? "";
}

async function main(baseURL, model) {
  const client = new OpenAI({ baseURL, apiKey: "unused" });
  const messages = [{ role: "user", content: "37 + 5 = ?" }];
  const chat = await client.chat.completions.create({ model, messages, max_tokens: 12, temperature: 0 });
  let said = "";
  for await (const piece of streamChat(client, model, messages[0].content)) said += piece;
  assert.strictEqual(said, chat.choices[0].message.content);
  const body = { model, input: "37 + 5 = ?", max_output_tokens: 12, temperature: 0 };
  const whole = await client.responses.create(body);
  const stream = client.responses.stream(body);
  let text = "";
  for await (const event of stream) if (event.type === "response.output_text.delta") text += event.delta;
  assert.strictEqual(text, whole.output_text);
  assert.strictEqual((await stream.finalResponse()).output_text, text);
  const called = await client.responses.create({
    model, input: "What is the weather in Oslo?", tools: [{ type: "function", ...tool }], tool_choice: "required",
    parallel_tool_calls: false, temperature: 0,
  });
  const [call] = called.output;
  assert.ok(["Oslo", "Paris", "Rome"].includes(JSON.parse(call.arguments).city));
  await client.responses.create({
    model, previous_response_id: called.id, max_output_tokens: 12,
    input: [{ type: "function_call_output", call_id: call.call_id, output: "sunny" }],
  });
  await client.responses.delete(called.id);
  await assert.rejects(client.responses.retrieve(called.id), { status: 404 });
  console.log(`'${whole.output_text}', ${call.name}(${call.arguments})`);
}

main(...process.argv.slice(2)).catch((error) => { console.error(error); process.exit(1); });
