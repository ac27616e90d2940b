// Opens a bundle in ONNX Runtime: onnxruntime-web in a browser or in Node, or onnxruntime-node.

const RUNS_HERE = ["ort-web", "ort-cpu", "onnx"];

// A function that returns a 128-bit vector: a browser that accepts it supports WASM SIMD.
const SIMD = [
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 8, 1, 6, 0, 65, 0, 253, 15, 11,
];

/** Returns why this browser cannot run onnxruntime-web, or null. */
export function missing() {
  if (typeof WebAssembly !== "object") return "This browser has no WebAssembly.";
  if (!WebAssembly.validate(new Uint8Array(SIMD)))
    return "This browser has no WASM SIMD, which onnxruntime-web needs: use a version from 2023 or later.";
  return null;
}

/** Returns the facts from a manifest that a page needs; throws an Error whose message is for users. */
export function facts(manifest) {
  if (manifest?.schema !== 1) throw new Error("manifest.json does not describe a bundle.");
  const { target, inputs, layers, graphs } = manifest;
  if (!RUNS_HERE.includes(target))
    throw new Error(`This bundle was made for ${target}. Export it again with --target ort-web.`);
  const arrays = inputs.filter((spec) => spec.name !== "k");
  if (arrays.length !== 1 || arrays[0].dtype !== "float32")
    throw new Error("Only models with one float32 input are supported.");
  const fits = (graph) => !graph.batches || graph.batches[0] <= 1;
  return {
    file: (graphs.find(fits) ?? graphs[0]).file,
    input: arrays[0],
    takesK: inputs.some((spec) => spec.name === "k"),
    k: layers[0].k,
    experts: Math.min(...layers.map((layer) => layer.experts)),
    layers: layers.map((layer) => ({ name: layer.name, experts: layer.experts })),
    precision: manifest.precision,
  };
}

/**
 * Opens a bundle. `ort` is the runtime's module, `read` returns a file of the bundle as a Uint8Array,
 * and `options` go to the session.
 */
export async function open(ort, read, options = {}) {
  const model = facts(JSON.parse(new TextDecoder().decode(await read("manifest.json"))));
  const [graph, weights] = await Promise.all([read(model.file), read("weights.bin")]);
  const externalData = [{ path: "weights.bin", data: weights }];
  const session = await ort.InferenceSession.create(graph, { ...options, externalData });

  /** Returns the output and the experts that each layer chose, for one input and k. */
  async function run(values, shape, k = model.k) {
    const feeds = { [model.input.name]: new ort.Tensor("float32", values, shape) };
    if (model.takesK) {
      if (!Number.isInteger(k) || k < 1 || k > model.experts)
        throw new Error(`k = ${k}: use a whole number from 1 to ${model.experts}.`);
      feeds.k = new ort.Tensor("int64", BigInt64Array.of(BigInt(k)), [1]);
    }
    const outputs = await session.run(feeds);
    const selected = Object.entries(outputs).filter(([name]) => name.endsWith("/selected"));
    return {
      output: Array.from(outputs[session.outputNames[0]].data),
      experts: Object.fromEntries(
        selected.map(([name, tensor]) => [
          name.slice(0, -"/selected".length),
          Array.from(tensor.data, Number).sort((a, b) => a - b),
        ]),
      ),
    };
  }

  return { ...model, run };
}
