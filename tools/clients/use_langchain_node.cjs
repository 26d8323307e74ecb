// Uses a server through LangChain.js as its users do; any fault is an exception. Knows nothing of Sluice.
//
// NODE_PATH=.node-clients/node_modules node use_langchain_node.cjs http://127.0.0.1:8000/v1 MODEL
const assert = require('node:assert');
const {HumanMessage, SystemMessage} = require('@langchain/core/messages');
const {tool} = require('@langchain/core/tools');
const {ChatOpenAI, OpenAIEmbeddings} = require('@langchain/openai');
const {z} = require('zod');

async function main(baseURL, model) {
  const configuration = {baseURL};
  const options = {model, configuration, apiKey: 'unused', temperature: 0, maxTokens: 100, maxRetries: 0};
  const question = [new SystemMessage('Answer shortly.'), new HumanMessage('37 + 5 = ?')];
  const said = [];
  for (const useResponsesApi of [false, true]) {
    const chat = new ChatOpenAI({...options, useResponsesApi});
    const whole = await chat.invoke(question);
    let text = '';
    let tokens = 0;
    for await (const chunk of await chat.stream(question)) {
      text += chunk.text;
      tokens += chunk.usage_metadata?.output_tokens ?? 0;
    }
    assert.strictEqual(text, whole.text);
    assert.strictEqual(tokens, whole.usage_metadata.output_tokens);
    const all = await chat.batch([question, question]);
    assert.deepStrictEqual(all.map((each) => each.text), [text, text]);

    const city = z.enum(['Oslo', 'Paris', 'Rome']);
    const schema = z.object({city, degrees: z.number().int().min(-9).max(39)});
    for (const method of ['jsonSchema', 'functionCalling']) {
      const held = await chat.withStructuredOutput(schema, {name: 'forecast', method}).invoke('The weather in Oslo?');
      schema.parse(held);
    }
    const weather = tool(() => 'sunny', {name: 'weather', description: 'The weather in a city.', schema: z.object({city})});
    const called = await chat.bindTools([weather], {tool_choice: 'weather'}).invoke('What is the weather in Oslo?');
    assert.deepStrictEqual(called.tool_calls.map((call) => call.name), ['weather']);
    said.push(`${JSON.stringify(text)}, weather(${JSON.stringify(called.tool_calls[0].args)})`);
  }
  const embeddings = await new OpenAIEmbeddings({model, configuration, apiKey: 'unused'}).embedDocuments(['a', 'b']);
  assert.strictEqual(embeddings.length, 2);
  console.log(`${said[0]}, ${embeddings[0].length} numbers`);
}

main(...process.argv.slice(2)).catch((error) => { console.error(error); process.exit(1); });
