// The conversation: exchanges of a question and an answer. At most one answer is in progress.

const exchanges = [];
let running = null; // the AbortController of the answer in progress

// Yields the documents of a stream of server-sent events. Throws an Error if the stream ends before [DONE].
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The stream ended before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // blank lines end events, comments keep the connection open
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// Returns the messages of a request for the last exchange. Earlier questions without an answer are left out.
function conversation() {
  const messages = valueOf("system") ? [{ role: "system", content: valueOf("system") }] : [];
  exchanges.forEach((exchange, index) => {
    const isLast = index === exchanges.length - 1;
    const answer = isLast ? null : exchange.answer.message();
    if (isLast || answer) messages.push(...exchange.questions);
    if (answer) messages.push(answer);
  });
  return messages;
}

async function answerLast() {
  const exchange = exchanges.at(-1);
  exchange.answer?.article.remove();
  const answer = (exchange.answer = new Answer(byId("log")));
  running = new AbortController();
  showButtons();
  let fault = "";
  try {
    const body = {
      model: byId("model").value || undefined,
      messages: conversation(),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...settingFields(),
    };
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...authorization() },
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await refusalOf(response));
    for await (const event of eventsOf(response)) answer.take(event);
  } catch (error) {
    if (running.signal.aborted) answer.ending = "stopped";
    else fault = error.message;
  }
  running = null;
  answer.end(fault);
  showButtons();
}

// After tool calls, the text is the result of each call.
function questionsFor(text) {
  const calls = exchanges.at(-1)?.answer.message()?.tool_calls ?? [];
  if (calls.length === 0) return [{ role: "user", content: text }];
  return calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: text }));
}

function send() {
  const text = valueOf("question");
  if (!text || running) return;
  byId("welcome").hidden = true;
  const questions = questionsFor(text);
  const article = element("article", "question");
  const shown = element("div", "text");
  article.append(element("h2", "", questions[0].role === "tool" ? "Result of the tool" : "You"), shown);
  byId("log").append(article);
  new Lines(shown).append(text);
  exchanges.push({ questions, answer: null });
  byId("question").value = "";
  answerLast();
}

function clearChat() {
  running?.abort();
  exchanges.length = 0;
  for (const article of byId("log").querySelectorAll("article")) article.remove();
  byId("welcome").hidden = false;
  showButtons();
  byId("question").focus();
}

function showButtons() {
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
  byId("regenerate").disabled = running !== null || exchanges.length === 0;
  byId("question").placeholder = exchanges.at(-1)?.answer?.calls.length ? "Result of the tool" : "Message";
}

function listenToChat() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("regenerate").addEventListener("click", answerLast);
  byId("clear").addEventListener("click", clearChat);
}
