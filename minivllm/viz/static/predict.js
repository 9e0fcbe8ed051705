// Questions about a run: the reader chooses, the trace judges, and the shared cursor goes to the step.
import { button, h, uniqueId } from "./ui.js";

const TITLES = { preempted: "Who is preempted?", evicted: "Whose content goes?", steps: "How many steps?" };

export async function render(card, data, context) {
  const { cursor } = context;
  const questions = await data.json(data.header.questions);
  const given = new Map(); // question -> choice
  let at = 0;

  const count = h("h3", { class: "mv-predict-count" });
  const situation = h("ul", { class: "mv-predict-situation" });
  const options = h("fieldset", { class: "mv-predict-options" });
  const verdict = h("p", { class: "mv-predict-verdict", "aria-live": "polite" });
  const answer = button("Check", null, check);
  const back = button("previous question", "back", () => show(at - 1));
  const next = button("next question", "next", () => show(at + 1));
  const bar = h("div", { class: "mv-predict-bar" }, answer, back, next);
  card.body.append(h("div", { class: "mv-predict" }, count, situation, options, bar, verdict));

  function chosen() {
    const input = options.querySelector("input:checked");
    return input ? Number(input.value) : null;
  }

  function judge(question, choice) {
    const right = choice === question.answer;
    verdict.className = `mv-predict-verdict ${right ? "mv-right" : "mv-wrong"}`;
    verdict.textContent = right ? `✓ Right: ${question.because}` : `✗ No, ${question.options[question.answer]}: ${question.because}`;
    for (const input of options.querySelectorAll("input")) {
      input.disabled = true;
      input.parentElement.classList.toggle("mv-answer", Number(input.value) === question.answer);
    }
    answer.disabled = true;
  }

  function check() {
    const choice = chosen();
    if (choice === null) {
      verdict.className = "mv-predict-verdict";
      verdict.textContent = "Choose one first.";
      return;
    }
    const question = questions[at];
    given.set(at, choice);
    judge(question, choice);
    if (cursor) cursor.go(question.step);
    score();
  }

  function score() {
    const right = [...given].filter(([i, choice]) => questions[i].answer === choice).length;
    card.subtitle.textContent = given.size ? `${right} of ${given.size} right, ${questions.length} questions in all` : `${questions.length} questions about this run; guess before you look`;
  }

  function show(n) {
    at = Math.max(0, Math.min(questions.length - 1, n));
    const question = questions[at];
    const name = uniqueId("predict");
    count.textContent = `${at + 1} of ${questions.length} · step ${question.step} · ${TITLES[question.kind]}`;
    situation.replaceChildren(...question.situation.map((line) => h("li", {}, line)));
    options.replaceChildren(h("legend", {}, question.text), ...question.options.map((text, i) =>
      h("label", {}, h("input", { type: "radio", name, value: i, checked: given.get(at) === i }), text)));
    answer.disabled = false;
    back.disabled = at === 0;
    next.disabled = at === questions.length - 1;
    verdict.textContent = "";
    verdict.className = "mv-predict-verdict";
    if (given.has(at)) judge(question, given.get(at));
    else if (cursor) cursor.go(Math.max(0, question.step - 1));
  }

  score();
  show(0);
}
