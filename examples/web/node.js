// Runs a bundle in Node: node node.js BUNDLE INPUT.f32 SHAPE [K] [onnxruntime-web]
// INPUT.f32 contains little-endian float32 values; SHAPE is, for example, 1,1,28,28. Prints JSON.
// With CALLS=100 in the environment, it also times 100 calls, after ten untimed ones.

import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { open } from "./bundle.js";

const [folder, input, shape, k, runtime = "onnxruntime-node"] = process.argv.slice(2);
const ort = await import(runtime);
const web = runtime === "onnxruntime-web";
if (web) ort.env.wasm.numThreads = 1;
const options = web ? { executionProviders: ["wasm"] } : { intraOpNumThreads: 1 };
const read = async (name) => new Uint8Array(await readFile(join(folder, name)));
try {
  const bundle = await open(ort, read, options);
  const bytes = await readFile(input);
  const values = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
  const call = () => bundle.run(values, shape.split(",").map(Number), k ? Number(k) : undefined);
  const found = await call();
  const calls = Number(process.env.CALLS ?? 0);
  if (calls) {
    for (let i = 0; i < 10; i++) await call();
    const times = [];
    for (let i = 0; i < calls; i++) {
      const start = performance.now();
      await call();
      times.push(performance.now() - start);
    }
    found.ms = times.sort((a, b) => a - b)[calls >> 1];
  }
  console.log(JSON.stringify(found));
} catch (error) {
  console.error(`error: ${error.message}`);
  process.exit(1);
}
