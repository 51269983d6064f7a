// One answer of the model: its text, reasoning, tool calls and figures, as elements of the page. All text of the model
// goes into text nodes, so that markup in it is shown and never interpreted.

const LONG_PAUSE_MS = 1000; // shorter pauses of a stream are not mentioned
const toDraw = new Set();

function element(name, className, text) {
  const made = document.createElement(name);
  made.className = className;
  if (text) made.textContent = text;
  return made;
}

// Draws all changes since the last frame at once. Browsers draw no frames in a hidden tab, so a timer replaces them.
function drawSoon(drawable) {
  if (toDraw.size === 0) {
    if (document.hidden) setTimeout(drawAll, 250);
    else requestAnimationFrame(drawAll);
  }
  toDraw.add(drawable);
}

function drawAll() {
  const log = byId("log");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  for (const drawable of toDraw) drawable.draw();
  toDraw.clear();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

// Text that grows. Each line is an element of its own, so the browser computes the layout of the last line alone. Blank
// lines belong to the element of the line before them, so that a copy of the text has the same blank lines.
class Lines {
  constructor(parent) {
    this.parent = parent;
    this.text = "";
    this.waiting = "";
    this.last = null; // the text node of the last line
    this.numBreaks = 0; // line breaks since the end of the last line
  }

  append(text) {
    this.text += text;
    this.waiting += text;
    drawSoon(this);
  }

  draw() {
    const lines = this.waiting.split("\n");
    this.waiting = "";
    lines.forEach((line, index) => {
      if (index > 0) this.numBreaks += 1;
      if (line) this.write(line);
    });
  }

  write(text) {
    if (this.last === null || this.numBreaks > 0) {
      this.last?.appendData("\n".repeat(this.numBreaks - 1));
      this.last = document.createTextNode("");
      const line = document.createElement("div");
      line.append(this.last);
      this.parent.append(line);
    }
    this.numBreaks = 0;
    this.last.appendData(text);
  }
}

class Answer {
  constructor(parent) {
    this.startedAt = performance.now();
    this.firstAt = null; // time of the first token
    this.lastAt = null;
    this.longestPauseMs = 0;
    this.numTokens = 0;
    this.ending = ""; // the reason why the answer has ended
    this.calls = [];
    this.reasoning = null;
    this.article = element("article", "answer");
    this.article.setAttribute("aria-busy", "true");
    this.body = element("div", "text");
    this.figures = element("p", "figures", "waiting for the first token");
    this.article.append(element("h2", "", "Model"), this.body, this.figures);
    this.content = new Lines(this.body);
    parent.append(this.article);
    byId("log").scrollTop = byId("log").scrollHeight;
  }

  // Processes one event of the stream.
  take(event) {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) this.numTokens = event.usage.completion_tokens;
    for (const choice of event.choices) {
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
      if (content || reasoning || calls) this.count();
      if (reasoning) this.reasoningLines().append(reasoning);
      if (content) this.content.append(content);
      for (const call of calls ?? []) this.takeCall(call);
      if (choice.finish_reason) this.ending = choice.finish_reason;
    }
    drawSoon(this);
  }

  count() {
    const now = performance.now();
    if (this.firstAt === null) this.firstAt = now;
    else this.longestPauseMs = Math.max(this.longestPauseMs, now - this.lastAt);
    this.lastAt = now;
  }

  reasoningLines() {
    if (this.reasoning === null) {
      const folded = element("details", "reasoning");
      const body = element("div", "text");
      folded.append(element("summary", "", "Reasoning"), body);
      this.article.insertBefore(folded, this.body);
      this.reasoning = new Lines(body);
    }
    return this.reasoning;
  }

  // A call arrives in pieces: the first piece has the id and the name, the other pieces continue the arguments.
  takeCall(piece) {
    let call = this.calls[piece.index];
    if (call === undefined) {
      const shown = element("div", "call");
      const name = element("strong", "name");
      const pre = element("pre", "arguments");
      pre.append(document.createTextNode(""));
      shown.append(name, pre);
      this.article.insertBefore(shown, this.figures);
      call = this.calls[piece.index] = { id: "", name, arguments: pre.firstChild };
    }
    if (piece.id) call.id = piece.id;
    if (piece.function?.name) call.name.textContent += piece.function.name;
    if (piece.function?.arguments) call.arguments.appendData(piece.function.arguments);
  }

  draw() {
    if (this.firstAt === null) return;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const parts = [`${this.numTokens} ${this.numTokens === 1 ? "token" : "tokens"}`];
    if (seconds > 0 && this.numTokens > 1) parts.push(`${((this.numTokens - 1) / seconds).toFixed(1)} tokens/s`);
    parts.push(`first token after ${((this.firstAt - this.startedAt) / 1000).toFixed(2)} s`);
    if (this.longestPauseMs > LONG_PAUSE_MS) parts.push(`longest pause ${(this.longestPauseMs / 1000).toFixed(1)} s`);
    if (this.ending && this.ending !== "stop") parts.push(ENDINGS[this.ending] ?? this.ending);
    this.figures.textContent = parts.join(" · ");
  }

  // Ends the answer; `fault` is the message of an error, or empty.
  end(fault) {
    if (this.firstAt === null) this.figures.textContent = ENDINGS[this.ending] ?? "";
    if (fault) this.article.append(element("p", "fault", fault));
    this.article.setAttribute("aria-busy", "false");
    toDraw.add(this);
    drawAll();
  }

  // Returns the assistant's message for the next request; null if the model has written nothing.
  message() {
    if (!this.content.text && this.calls.length === 0) return null;
    const message = { role: "assistant", content: this.content.text };
    if (this.calls.length > 0) {
      message.tool_calls = this.calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name.textContent, arguments: call.arguments.data },
      }));
    }
    return message;
  }
}

const ENDINGS = { length: "cut off at the limit of tokens", tool_calls: "waits for the tool's result", stopped: "stopped" };
