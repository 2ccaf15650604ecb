// Reads scores.json (version 1) without cpt: `node docs/examples/read_scores.js outputs/NAME/RUN/scores.json`.
//
// Prints the perplexity of each model (row) on each test text (column), and what was learned and forgotten, in nats
// per token, computed here from the matrix and as the file has it.

const { readFileSync } = require("node:fs");

const [path] = process.argv.slice(2);
if (path === undefined) {
  console.error("usage: node read_scores.js SCORES_JSON");
  process.exit(2);
}
const scores = JSON.parse(readFileSync(path, "utf-8"));
if (scores.version !== 1) {
  console.error(`${path}: version ${scores.version} is invalid. Allowed: 1`);
  process.exit(1);
}

// `nll` is [rows][columns] in nats per scored token; null: not measured.
const perplexity = (loss) => (loss === null ? "" : Math.exp(loss).toFixed(2));
console.log(["after", ...scores.domains].join("\t"));
scores.rows.forEach((row, index) => {
  console.log([row, ...scores.nll[index].map(perplexity)].join("\t"));
});

// Rows are the base and then the stages, so domain number k of the order was trained before row k + 1.
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const learned = [];
const forgotten = [];
scores.run.order.forEach((domain, stage) => {
  const column = scores.domains.indexOf(domain);
  const base = scores.nll[0][column];
  const justLearned = scores.nll[stage + 1]?.[column] ?? null;
  const final = scores.nll.at(-1)[column];
  if (base !== null && justLearned !== null) learned.push(base - justLearned);
  // The last domain has not had a later stage in which it could be forgotten.
  const isLast = stage + 1 === scores.rows.length - 1;
  if (!isLast && justLearned !== null && final !== null) forgotten.push(final - justLearned);
});
const inFile = scores.metrics.FG?.nats ?? null;
if (learned.length > 0) console.log(`learned\t${mean(learned).toFixed(4)}`);
if (forgotten.length > 0) console.log(`forgot\t${mean(forgotten).toFixed(4)}\tin the file: ${inFile?.toFixed(4)}`);
