// @grpc/grpc-js with the .proto files.
import assert from 'node:assert/strict'
import { after, test } from 'node:test'
import grpc from '@grpc/grpc-js'
import loader from '@grpc/proto-loader'

const options = { includeDirs: [process.env.PROTO], keepCase: true, enums: String, longs: Number }
const loaded = grpc.loadPackageDefinition(loader.loadSync('pdserve/v1/inference.proto', options))
const stub = new loaded.pdserve.v1.InferenceService(process.env.GRPC, grpc.credentials.createInsecure())
after(() => stub.close())

const generate = (request) =>
  new Promise((resolve, reject) => {
    const messages = []
    const call = stub.Generate(request)
    call.on('data', (message) => messages.push(message))
    call.on('end', () => resolve(messages))
    call.on('error', reject)
  })
const chat = { messages: [{ role: 'user', content: 'What is the capital of France?' }] }

test('the model', async () => {
  const model = await new Promise((resolve, reject) =>
    stub.GetModel({}, (error, found) => (error ? reject(error) : resolve(found))),
  )
  assert.equal(model.model, 'demo')
  assert.equal(model.max_model_len, 4096)
})

test('a chat streams', async () => {
  const messages = await generate({ chat, sampling: { temperature: 0, max_tokens: 16 }, stream: true })
  assert.equal(messages.map((message) => message.text).join(''), 'The capital of France is Paris.')
  assert.equal(messages.at(-1).finish_reason, 'FINISH_REASON_STOP')
  assert.ok(messages.at(-1).usage.completion_tokens > 0)
})

test('a stream has many messages', async () => {
  // what a client has not read is merged, so a short answer may have two
  const messages = await generate({ chat, sampling: { max_tokens: 1000, ignore_eos: true }, stream: true })
  assert.ok(messages.length > 2)
  assert.equal(messages.at(-1).usage.completion_tokens, 1000)
})

test('an error names field and value', async () => {
  await assert.rejects(generate({ chat, sampling: { top_p: 2 } }), (error) => {
    assert.equal(error.code, grpc.status.INVALID_ARGUMENT)
    assert.match(error.details, /top_p must be above 0 and at most 1, not 2/)
    assert.deepEqual(error.metadata.get('pdserve-error-code'), ['invalid_request'])
    return true
  })
})

test('a cancelled call ends', async () => {
  const call = stub.Generate({ chat, sampling: { max_tokens: 2000, ignore_eos: true }, stream: true })
  const error = await new Promise((resolve) => {
    call.once('data', () => call.cancel())
    call.on('error', resolve)
  })
  assert.equal(error.code, grpc.status.CANCELLED)
})
