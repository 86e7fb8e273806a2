// The openai package of Node.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import OpenAI from 'openai'
import { zodResponseFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: 'none', maxRetries: 0 })
const messages = [{ role: 'user', content: 'What is the capital of France?' }]
const ANSWER = 'The capital of France is Paris.'
const number = { type: 'integer', minimum: 0, maximum: 99 }
const parameters = { type: 'object', properties: { a: number, b: number }, required: ['a', 'b'], additionalProperties: false }
const tools = [{ type: 'function', function: { name: 'add', parameters } }]
const forced = { tools, tool_choice: 'required', parallel_tool_calls: false }
const ask = (fields) => client.chat.completions.create({ model: 'demo', messages, temperature: 0, ...fields })

test('a chat has its answer and usage', async () => {
  const done = await ask()
  assert.equal(done.choices[0].message.content, ANSWER)
  assert.equal(done.choices[0].finish_reason, 'stop')
  assert.equal(done.usage.total_tokens, done.usage.prompt_tokens + done.usage.completion_tokens)
})

test('a stream has the same answer and usage', async () => {
  let text = ''
  let usage
  for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta.content ?? ''
    usage = chunk.usage ?? usage
  }
  assert.equal(text, ANSWER)
  assert.equal(usage.completion_tokens, (await ask()).usage.completion_tokens)
})

test('a stream that is left early', async () => {
  for await (const chunk of await ask({ stream: true, max_tokens: 2000, ignore_eos: true })) {
    assert.ok(chunk.choices)
    break
  }
})

test('a call that must come, whole and streamed', async () => {
  const [call] = (await ask(forced)).choices[0].message.tool_calls
  assert.equal(call.function.name, 'add')
  assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)).sort(), ['a', 'b'])
  const streamed = client.chat.completions.stream({ model: 'demo', messages, temperature: 0, ...forced })
  const [same] = (await streamed.finalMessage()).tool_calls
  assert.equal(same.function.arguments, call.function.arguments)
})

test('a form', async () => {
  const City = z.object({ city: z.enum(['Paris', 'Rome']), size: z.number().int().min(1).max(99) })
  const response_format = zodResponseFormat(City, 'city')
  const done = await client.chat.completions.parse({ model: 'demo', messages, temperature: 0, response_format })
  assert.ok(City.parse(done.choices[0].message.parsed))
})

test('completions, embeddings, models', async () => {
  const text = { model: 'demo', prompt: 'The capital of France is', temperature: 0, max_tokens: 8, stop: '.' }
  assert.equal((await client.completions.create(text)).choices[0].text, ' Paris')
  const decoded = await client.embeddings.create({ model: 'demo', input: ['Paris', 'Rome'], dimensions: 8 })
  assert.deepEqual(decoded.data.map((entry) => entry.embedding.length), [8, 8])
  assert.ok(Math.abs(Math.hypot(...decoded.data[0].embedding) - 1) < 1e-5)
  assert.deepEqual((await client.models.list()).data.map((model) => model.id), ['demo'])
})

test('errors have the classes of the package', async () => {
  await assert.rejects(ask({ top_p: 2 }), (error) => error instanceof OpenAI.BadRequestError && error.param === 'top_p')
  await assert.rejects(ask({ model: 'other' }), OpenAI.NotFoundError)
})

test('responses, whole and streamed', async () => {
  const request = { model: 'demo', input: 'What is the capital of France?', temperature: 0 }
  assert.equal((await client.responses.create(request)).output_text, ANSWER)
  let text = ''
  for await (const event of await client.responses.create({ ...request, stream: true })) {
    if (event.type === 'response.output_text.delta') text += event.delta
  }
  assert.equal(text, ANSWER)
})
