// Streams generations from Sluice's gRPC API; any fault is an exception.
//
// NODE_PATH=.node-clients/node_modules node use_grpc_node.cjs 127.0.0.1:50051 server/proto/sluice.proto
const assert = require('node:assert');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

function connect(target, proto) {
  const {sluice} = grpc.loadPackageDefinition(loader.loadSync(proto, {defaults: true, enums: String, oneofs: true}));
  return new sluice.v1.GenerationService(target, grpc.credentials.createInsecure());
}

// Yields each delta's text. Leaving the loop early cancels the call, and the server ends the request.
async function* stream(service, request, seconds) {
  const call = service.Generate(request, {deadline: Date.now() + 1000 * seconds});
  try {
    for await (const message of call) for (const delta of message.deltas) yield delta.text;
  } finally {
    call.cancel();
  }
}

async function main(target, proto) {
  const service = connect(target, proto);
  const request = {text: 'Once upon a time', sampling: {temperature: 0}, stopping: {maxTokens: 40}};
  let text = '';
  for await (const piece of stream(service, request, 60)) text += piece;
  assert.ok(text.length);

  const long = {...request, stopping: {maxTokens: 2000, ignoreEos: true}};
  for await (const piece of stream(service, long, 60)) if (piece) break;
  await assert.rejects(async () => {
    for await (const piece of stream(service, long, 0.2)) assert.strictEqual(typeof piece, 'string');
  }, error => error.code === grpc.status.DEADLINE_EXCEEDED);
  await assert.rejects(async () => {
    for await (const piece of stream(service, {...request, sampling: {topP: 3}}, 60)) assert.fail(piece);
  }, error => error.code === grpc.status.INVALID_ARGUMENT && /top_p=3/.test(error.details));
  console.log(`${JSON.stringify(text)}, cancelled one, DEADLINE_EXCEEDED, INVALID_ARGUMENT`);
  service.close();
}

main(...process.argv.slice(2)).catch((error) => { console.error(error); process.exit(1); });
