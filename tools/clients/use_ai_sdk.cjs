// Uses a server through the AI SDK as its users do; any fault is an exception. Knows nothing of Sluice.
//
// NODE_PATH=.node-clients/node_modules node use_ai_sdk.cjs http://127.0.0.1:8000/v1 MODEL
const assert = require('node:assert');
const {createOpenAICompatible} = require('@ai-sdk/openai-compatible');
const {Output, embedMany, generateText, stepCountIs, streamText, tool} = require('ai');
const {z} = require('zod');

const city = z.enum(['Oslo', 'Paris', 'Rome']);

async function main(baseURL, name) {
  const provider = createOpenAICompatible({
    name: 'sluice', baseURL, apiKey: 'unused', includeUsage: true, supportsStructuredOutputs: true,
  });
  const model = provider(name);
  const options = {model, temperature: 0, maxOutputTokens: 100, maxRetries: 0};
  const prompt = '37 + 5 = ?';
  const whole = await generateText({...options, prompt});
  const streamed = streamText({...options, prompt});
  let text = '';
  for await (const piece of streamed.textStream) text += piece;
  assert.strictEqual(text, whole.text);
  assert.strictEqual((await streamed.usage).outputTokens, whole.usage.outputTokens);

  const schema = z.object({city, degrees: z.number().int().min(-9).max(39)});
  const weather = 'What is the weather in Oslo?';
  const {output} = await generateText({...options, prompt: weather, output: Output.object({schema})});
  schema.parse(output);
  let last;
  const objects = streamText({...options, prompt: weather, output: Output.object({schema})});
  for await (const part of objects.partialOutputStream) last = part;
  assert.deepStrictEqual(last, output);

  const calls = [];
  const getWeather = tool({
    description: 'The weather in a city.',
    inputSchema: z.object({city}),
    execute: async (input) => { calls.push(input.city); return 'sunny'; },
  });
  const tools = {getWeather};
  await generateText({...options, prompt: weather, tools, toolChoice: 'required', stopWhen: stepCountIs(2)});
  const stream = streamText({...options, prompt: weather, tools, toolChoice: {type: 'tool', toolName: 'getWeather'}});
  assert.strictEqual(await stream.finishReason, 'tool-calls');
  assert.ok(calls.length >= 3, calls);

  const {embeddings} = await embedMany({model: provider.textEmbeddingModel(name), values: ['the cat sat', prompt]});
  assert.strictEqual(embeddings.length, 2);
  console.log(`${JSON.stringify(text)}, ${JSON.stringify(output)}, ${calls.length} calls of a tool, ${embeddings[0].length} numbers`);
}

main(...process.argv.slice(2)).catch((error) => { console.error(error); process.exit(1); });
