// One sample of a trajectory: its turns, each token coloured by one of its numbers. Tokens outside the loss are marked:
// those of the environment, which have no logprob, and those that were sampled and left out (too old, another's turn).
import { h, number } from "./dom.js";

const STEPS = 9; // classes d0..d8 (diverging) and q0..q8 (one-sided)
const clamp = (share) => Math.max(0, Math.min(STEPS - 1, Math.round(share * (STEPS - 1))));

export const COLOURS = {
  logprob: { of: (t) => t.logprob, look: (v) => `q${clamp(-v / 4)}`, ends: ["certain", "unlikely (−4 nats)"] },
  ratio: { of: (t) => t.ratio, look: (v) => `d${clamp(0.5 + Math.log2(v) / 2)}`, ends: ["½", "2"] },
  advantage: { of: (t) => t.advantage, look: (v) => `d${clamp(0.5 + v / 4)}`, ends: ["−2", "+2"] },
  version: { of: (t) => t.version, look: (v, all) => `q${clamp((all.newest - v) / Math.max(1, all.bound))}`, ends: ["newest", "oldest"] },
};

export function tokensOf(line, step) {
  const pieces = line.tokens ?? (line.response_ids ?? []).map((id) => `⟨${id}⟩`);
  return pieces.map((text, i) => {
    const trained = line.loss_mask[i] === 1, sampled = trained || line.logprobs[i] !== 0, trainer = line.trainer_logprobs?.[i];
    return {
      text, trained, sampled, id: line.response_ids[i],
      logprob: sampled ? line.logprobs[i] : undefined, version: sampled ? line.versions[i] : undefined, lag: step - 1 - line.versions[i],
      advantage: trained ? line.advantage : undefined,
      ratio: trained && trainer !== null && trainer !== undefined ? Math.exp(trainer - line.logprobs[i]) : undefined,
    };
  });
}

const printable = (text) => text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") || "∅";

function about(token) {
  const parts = [`token ${token.id} ${JSON.stringify(token.text)}`];
  if (!token.sampled) return `${parts[0]}\nof the environment: not trained`;
  if (!token.trained) parts.push("sampled, but not trained: outside the loss");
  parts.push(`logprob ${number(token.logprob)}`);
  if (token.trained) parts.push(`ratio ${number(token.ratio)}`, `advantage ${number(token.advantage)}`);
  parts.push(`version ${token.version}, lag ${token.lag}`);
  return parts.join("\n");
}

function turns(tokens) {
  const found = [];
  for (const token of tokens) {
    if (!found.length || found.at(-1).sampled !== token.sampled) found.push({ sampled: token.sampled, tokens: [] });
    found.at(-1).tokens.push(token);
  }
  return found;
}

function heading(part, turn) {
  const trained = part.tokens.filter((token) => token.trained).length, all = part.tokens.length;
  const note = trained === all ? "" : trained ? `${all - trained} of ${all} tokens not trained` : "not trained";
  return h("h4", {}, part.sampled ? `turn ${turn}` : "environment", note && h("span", { class: "badge" }, note));
}

// `shown` bounds the page: an answer of 30,000 tokens is drawn in parts.
export function draw(answer, colour, shown, more) {
  const line = answer.line, prompt = Array.isArray(line.prompt) ? line.prompt : [{ role: "prompt", content: String(line.prompt ?? "") }];
  const blocks = prompt.map((message) => h("div", { class: "turn context" }, h("h4", {}, String(message.role ?? "prompt")), h("pre", {}, typeof message.content === "string" ? message.content : JSON.stringify(message.content))));
  if (!line.response_ids) {
    blocks.push(h("div", { class: "turn" }, h("h4", {}, "answer"), h("pre", {}, String(line.text ?? ""))));
    if (line.ground_truth !== undefined) blocks.push(h("div", { class: "turn context" }, h("h4", {}, "ground truth"), h("pre", {}, typeof line.ground_truth === "string" ? line.ground_truth : JSON.stringify(line.ground_truth))));
    return h("div", { class: "turns" }, blocks);
  }
  const all = tokensOf(line, answer.step), scale = COLOURS[colour];
  const newest = answer.step - 1, bound = Math.max(1, ...all.map((token) => token.lag));
  let turn = 0;
  for (const part of turns(all.slice(0, shown))) {
    if (part.sampled) turn++;
    blocks.push(h("div", { class: `turn${part.sampled ? "" : " context"}` }, heading(part, turn),
      h("pre", {}, part.tokens.map((token) => {
        const value = token.sampled ? scale.of(token) : undefined;
        return h("span", { class: `token${token.trained ? "" : " untrained"}${value === undefined ? "" : ` ${scale.look(value, { newest, bound })}`}`, title: about(token) }, printable(token.text));
      }))));
  }
  if (all.length > shown) blocks.push(h("button", { type: "button", onclick: more }, `${all.length - shown} more tokens`));
  return h("div", { class: "turns" }, blocks);
}

export function scale(colour) {
  const { ends } = COLOURS[colour], family = ["ratio", "advantage"].includes(colour) ? "d" : "q";
  return h("span", { class: "scale" }, ends[0], Array.from({ length: STEPS }, (_, i) => h("i", { class: `${family}${i}` })), ends[1]);
}
