// The AI SDK with its provider for compatible servers, and with that of OpenAI.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, generateObject, generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const server = { baseURL: process.env.BASE_URL, apiKey: 'none' }
const compatible = createOpenAICompatible({ name: 'pdserve', ...server, includeUsage: true, supportsStructuredOutputs: true })
const openai = createOpenAI(server)
const prompt = 'What is the capital of France?'
const ANSWER = 'The capital of France is Paris.'
const models = { compatible: compatible('demo'), 'openai chat': openai.chat('demo'), 'openai responses': openai('demo') }
const number = z.number().int().min(0).max(99)

for (const [name, model] of Object.entries(models)) {
  const settings = { model, temperature: 0, maxRetries: 0 }

  test(`${name}: text`, async () => {
    const done = await generateText({ ...settings, system: 'Be brief.', prompt })
    assert.equal(done.text, ANSWER)
    assert.equal(done.finishReason, 'stop')
    assert.ok(done.usage.outputTokens > 0)
  })

  test(`${name}: stream`, async () => {
    const result = streamText({ ...settings, prompt })
    const pieces = []
    for await (const piece of result.textStream) pieces.push(piece)
    assert.ok(pieces.length > 2)
    assert.equal(pieces.join(''), ANSWER)
    assert.ok((await result.usage).outputTokens > 0)
  })

  test(`${name}: a tool and its result`, async () => {
    const calls = []
    const execute = async (given) => {
      calls.push(given)
      return given.a + given.b
    }
    const add = tool({ description: 'Add two numbers.', inputSchema: z.object({ a: number, b: number }), execute })
    const done = await generateText({
      ...settings,
      prompt: 'What is 7 plus 5?',
      tools: { add },
      stopWhen: stepCountIs(2),
      maxOutputTokens: 300,
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? 'required' : 'none' }),
    })
    assert.ok(calls.length >= 1)
    assert.deepEqual(Object.keys(calls[0]).sort(), ['a', 'b'])
    assert.equal(done.steps.length, 2)
    assert.equal(done.steps[0].finishReason, 'tool-calls')
    assert.ok(done.steps[1].usage.inputTokens > 0)
  })

  test(`${name}: a form`, async () => {
    const schema = z.object({ city: z.enum(['Paris', 'Rome']), size: number })
    assert.ok(schema.parse((await generateObject({ ...settings, prompt, schema })).object))
  })
}

test('embeddings', async () => {
  for (const model of [compatible.embeddingModel('demo'), openai.embedding('demo')]) {
    const { embeddings } = await embedMany({ model, values: ['Paris', 'Rome'], maxRetries: 0 })
    assert.equal(embeddings.length, 2)
    assert.notDeepEqual(embeddings[0], embeddings[1])
  }
})

test('an error is told', async () => {
  const settings = { model: compatible('demo'), prompt, topP: 2, maxRetries: 0 }
  await assert.rejects(generateText(settings), (error) => error.statusCode === 400 && /top_p/.test(error.message))
})
