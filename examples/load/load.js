// k6 run -e URL=http://localhost:8000 -e RATE=20 examples/load/load.js
// Open loop: requests arrive at RATE a second whatever has become of those before; 429 counts as an answer.
// -e DURATION=60s, and where the server needs them -e MODEL=demo and -e API_KEY=... (default: OPENAI_API_KEY).
import http from 'k6/http';
import { check } from 'k6';
import { Counter, Trend } from 'k6/metrics';

const refused = new Counter('refused');
const refusal = new Trend('refusal_ms', true);
const key = __ENV.API_KEY || __ENV.OPENAI_API_KEY;
const headers = { 'Content-Type': 'application/json', ...(key ? { Authorization: `Bearer ${key}` } : {}) };
const model = __ENV.MODEL ? { model: __ENV.MODEL } : {};
const url = `${__ENV.URL || 'http://localhost:8000'}/v1/completions`;

export const options = {
  scenarios: {
    open: {
      executor: 'constant-arrival-rate',
      rate: Number(__ENV.RATE || 20),
      timeUnit: '1s',
      duration: __ENV.DURATION || '60s',
      preAllocatedVUs: 512,
    },
  },
  thresholds: { checks: ['rate>0.999'], refusal_ms: ['p(99)<5'] },
};

export default function () {
  const body = JSON.stringify({ ...model, prompt: `# ${Math.random()}\ndef main():`, max_tokens: 64 });
  const answer = http.post(url, body, { headers });
  check(answer, { 'served or refused': (each) => each.status === 200 || each.status === 429 });
  if (answer.status === 429) {
    refused.add(1);
    refusal.add(answer.timings.waiting);
  }
}
