// Uses a server through @openai/agents as its users do; any fault is an exception. Knows nothing of Sluice.
//
// NODE_PATH=.node-clients/node_modules node use_agents_node.cjs http://127.0.0.1:8000/v1 MODEL
const assert = require('node:assert');
const {Agent, OpenAIProvider, Runner, tool} = require('@openai/agents');
const {z} = require('zod');

const calls = [];
const weather = tool({
  name: 'get_weather',
  description: 'The weather in a city.',
  parameters: z.object({city: z.enum(['Oslo', 'Paris', 'Rome'])}),
  execute: async ({city}) => { calls.push(city); return 'sunny'; },
});

async function main(baseURL, model) {
  let said;
  for (const useResponses of [true, false]) {
    const modelProvider = new OpenAIProvider({apiKey: 'unused', baseURL, useResponses});
    const runner = new Runner({modelProvider, tracingDisabled: true});
    const settings = {temperature: 0, maxTokens: 100};
    const plain = new Agent({name: 'plain', model, instructions: 'Be brief.', modelSettings: settings});
    said = (await runner.run(plain, '37 + 5 = ?')).finalOutput;
    const stream = await runner.run(plain, '37 + 5 = ?', {stream: true});
    let text = '';
    for await (const piece of stream.toTextStream()) text += piece;
    assert.strictEqual(text, said);
    const agent = new Agent({
      name: 'weather', model, tools: [weather],
      modelSettings: {...settings, toolChoice: 'required', parallelToolCalls: false},
    });
    await runner.run(agent, 'What is the weather in Oslo?');
    const outputType = z.object({city: z.enum(['Oslo', 'Paris', 'Rome'])});
    const typed = new Agent({name: 'typed', model, outputType, modelSettings: settings});
    outputType.parse((await runner.run(typed, 'What is the weather in Oslo?')).finalOutput);
  }
  assert.strictEqual(calls.length, 2);
  console.log(`${JSON.stringify(said)}, ${calls.length} calls of a tool`);
}

main(...process.argv.slice(2)).catch((error) => { console.error(error); process.exit(1); });
