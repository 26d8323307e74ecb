// Uses a server through @anthropic-ai/sdk as its users do; any fault is an exception. Knows nothing of Sluice.
//
// node use_anthropic_node.cjs http://127.0.0.1:8000 MODEL, with NODE_PATH set to the packages
const assert = require('node:assert');
const {Anthropic, NotFoundError} = require('@anthropic-ai/sdk');

const [baseURL, model] = process.argv.slice(2);
const client = new Anthropic({baseURL, apiKey: 'unused', maxRetries: 0});
const weather = {
  name: 'get_weather',
  input_schema: {
    type: 'object',
    properties: {city: {type: 'string', enum: ['Oslo', 'Paris', 'Rome']}},
    required: ['city'],
    additionalProperties: false,
  },
};

async function main() {
  const question = {model, max_tokens: 12, temperature: 0, messages: [{role: 'user', content: '37 + 5 = ?'}]};
  const whole = await client.messages.create(question);
  let text = '';
  const stream = client.messages.stream(question).on('text', piece => (text += piece));
  const final = await stream.finalMessage();
  assert.strictEqual(text, whole.content[0].text);
  assert.deepStrictEqual(final.content.map(block => block.text), [text]);
  const counted = await client.messages.countTokens({model, messages: question.messages});
  assert.strictEqual(counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);

  const messages = [{role: 'user', content: 'What is the weather in Oslo?'}];
  const asked = {...question, max_tokens: 100, tools: [weather], tool_choice: {type: 'tool', name: 'get_weather'}};
  const called = await client.messages.stream({...asked, messages}).finalMessage();
  const [call] = called.content;
  assert.strictEqual(called.stop_reason, 'tool_use');
  assert.ok(weather.input_schema.properties.city.enum.includes(call.input.city), JSON.stringify(call));
  messages.push({role: 'assistant', content: called.content});
  messages.push({role: 'user', content: [{type: 'tool_result', tool_use_id: call.id, content: 'sunny'}]});
  await client.messages.create({...asked, tool_choice: {type: 'auto'}, messages});
  await assert.rejects(client.messages.create({...question, model: 'another'}), NotFoundError);
  console.log(`${JSON.stringify(text)}, ${call.name}(${JSON.stringify(call.input)}), ${counted.input_tokens} tokens`);
}

main();
