// The page: draw a digit, see its class and the selected experts, change k.
// The address may contain ?bundle=FOLDER&report=RESULTS.JSON&provider=webgpu&threads=4

import { missing, open } from "./bundle.js";

const parameters = new URLSearchParams(location.search);
const folder = parameters.get("bundle") ?? "bundle";
const report = parameters.get("report") ?? "report/results.json";
const provider = parameters.get("provider") ?? "wasm";
const CALLS_MS = 100; // how long calls are repeated to measure the time of one

const element = (id) => document.getElementById(id);
const canvas = element("canvas");
const pen = canvas.getContext("2d", { willReadFrequently: true });

function showProblem(problem) {
  element("problem").textContent = problem;
}

async function read(name) {
  let answer;
  try {
    answer = await fetch(`${folder}/${name}`);
  } catch {
    throw new Error(`${folder}/${name} cannot be read: is the server still running?`);
  }
  if (!answer.ok)
    throw new Error(`${folder}/${name} was not found (${answer.status}): put a bundle into ${folder}/.`);
  return new Uint8Array(await answer.arrayBuffer());
}

/** Returns the accuracy by k of a report's graphs in this precision; empty without a report. */
async function accuracies(precision) {
  const found = new Map();
  const answer = await fetch(report).catch(() => null);
  if (!answer?.ok) return found;
  for (const row of (await answer.json()).rows)
    if (row.accuracy && row.precision === precision && !row.engine.startsWith("pytorch"))
      found.set(row.k, row.accuracy);
  return found;
}

/** Returns the drawing as in training: cropped, filling the image, with pixels from 0 to 1. */
function pixels(height, width) {
  const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
  let [left, top, right, bottom] = [canvas.width, canvas.height, -1, -1];
  for (let y = 0; y < canvas.height; y++)
    for (let x = 0; x < canvas.width; x++)
      if (data[4 * (y * canvas.width + x)] > 0) {
        [left, right] = [Math.min(left, x), Math.max(right, x)];
        [top, bottom] = [Math.min(top, y), Math.max(bottom, y)];
      }
  if (right < 0) return null;
  const size = Math.max(right - left, bottom - top) + 1;
  const small = new OffscreenCanvas(width, height).getContext("2d");
  small.imageSmoothingQuality = "high";
  const [x, y] = [(left + right + 1 - size) / 2, (top + bottom + 1 - size) / 2];
  small.drawImage(canvas, x, y, size, size, 0, 0, width, height);
  const grey = small.getImageData(0, 0, width, height).data;
  return Float32Array.from({ length: width * height }, (_, i) => grey[4 * i] / 255);
}

function show(bundle, found, k) {
  const best = Math.max(...found.output);
  element("answer").textContent = found.output.indexOf(best);
  element("layers").replaceChildren(
    ...bundle.layers.flatMap(({ name, experts }) => {
      const title = document.createElement("p");
      const list = document.createElement("ul");
      const chosen = found.experts[name];
      title.textContent = chosen
        ? `${name}: ${chosen.length} of ${experts} experts, selected for this image`
        : `${name}: the graph does not output its selected experts (export with --expose-routing)`;
      list.className = "experts";
      for (let i = 0; chosen && i < experts; i++) {
        const item = document.createElement("li");
        item.textContent = i;
        if (chosen.includes(i)) {
          item.className = "chosen";
          item.ariaLabel = `expert ${i}, selected`;
        }
        list.append(item);
      }
      return [title, list];
    }),
  );
  element("latency").textContent = `${found.ms.toFixed(3)} ms (${provider})`;
  const known = bundle.accuracy.get(k);
  element("accuracy").textContent = known
    ? `${(100 * known.top1).toFixed(1)}% of ${known.n} test images`
    : "not in the report";
}

async function start() {
  const problem = missing();
  if (problem) return showProblem(problem);
  const file = provider === "webgpu" ? "ort.webgpu.min.mjs" : "ort.wasm.min.mjs";
  let ort;
  try {
    ort = await import(`./node_modules/onnxruntime-web/dist/${file}`);
  } catch {
    return showProblem("onnxruntime-web is not installed: run `npm ci` in this folder.");
  }
  ort.env.wasm.numThreads = Number(parameters.get("threads") ?? 1);
  const bundle = await open(ort, read, { executionProviders: [provider] });
  bundle.accuracy = await accuracies(bundle.precision);
  const [channels, height, width] = bundle.input.shape.slice(1);
  if (channels !== 1 || !Number.isInteger(height) || !Number.isInteger(width))
    throw new Error(`This page draws (1, height, width), but the model expects (${bundle.input.shape}).`);

  const slider = element("k");
  slider.max = bundle.experts;
  slider.value = bundle.takesK ? Math.max(1, bundle.experts >> 2) : (bundle.k ?? bundle.experts);
  slider.disabled = !bundle.takesK;
  const count = () => (element("count").textContent = `${slider.value} of ${bundle.experts}`);
  count();

  let running = false;
  let outdated = false;
  async function update() {
    count();
    if (running) return void (outdated = true);
    const values = pixels(height, width);
    if (!values) return;
    running = true;
    try {
      do {
        outdated = false;
        const [k, drawn] = [Number(slider.value), pixels(height, width)];
        const call = () => bundle.run(drawn, [1, 1, height, width], k);
        const found = await call();
        let calls = 0;
        const began = performance.now();
        while (performance.now() - began < CALLS_MS && !outdated) {
          await call();
          calls++;
        }
        found.ms = (performance.now() - began) / Math.max(calls, 1);
        show(bundle, found, k);
        window.last = { ...found, k, values: Array.from(drawn) }; // for the console
      } while (outdated);
    } finally {
      running = false;
    }
  }

  pen.lineWidth = 22;
  pen.lineCap = pen.lineJoin = "round";
  pen.strokeStyle = "#fff";
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pen.beginPath();
    pen.moveTo(event.offsetX, event.offsetY);
    pen.lineTo(event.offsetX, event.offsetY);
    pen.stroke();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!event.buttons) return;
    pen.lineTo(event.offsetX, event.offsetY);
    pen.stroke();
  });
  const safely = () => update().catch((error) => showProblem(error.message));
  canvas.addEventListener("pointerup", safely);
  slider.addEventListener("input", safely);
  element("clear").addEventListener("click", () => {
    pen.clearRect(0, 0, canvas.width, canvas.height);
    element("answer").textContent = "";
  });
  document.documentElement.dataset.ready = "1";
}

start().catch((error) => showProblem(error.message));
