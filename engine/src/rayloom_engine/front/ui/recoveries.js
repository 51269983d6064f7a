// The strip: state, epoch and recoveries of the engine, read once a second from ui/status.

const READ_EVERY_MS = 1000;
const READ_TIMEOUT_MS = 5000;
let isLocked = false; // true while the server refuses the API key, or a request without a key
let newestEnd; // time of the loss in the newest ended recovery, as last read; undefined before the first reading

function showState(state, text) {
  byId("state").dataset.state = state;
  byId("state").textContent = text ?? state;
}

function plural(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function sentenceOf(recovery) {
  const time = new Date(recovery.at * 1000).toLocaleTimeString();
  const lost = `${time} ${recovery.process} lost`;
  if (recovery.seconds === null) return `${lost} · recovering`;
  const replayed = plural(recovery.replayed_requests, "request");
  return `${lost} · back after ${recovery.seconds.toFixed(2)} s · ${replayed} replayed`;
}

function showStatus(status) {
  const { running, waiting, failed } = status.requests;
  showState(status.state);
  byId("counts").textContent =
    `epoch ${status.epoch} · ${plural(status.num_ranks, "rank")} · ` +
    `${running} running · ${waiting} waiting · ${failed} failed`;
  const sentences = status.recoveries.map(sentenceOf);
  const items = Array.from(byId("recoveries").children);
  if (sentences.join("\n") !== items.map((item) => item.textContent).join("\n")) {
    byId("recoveries").replaceChildren(
      ...status.recoveries.map((recovery, index) =>
        element("li", recovery.seconds === null ? "open" : "", sentences[index]),
      ),
    );
  }
  announce(status);
}

// A screen reader reads a new recovery once; the figures of the strip change too often to be read.
function announce(status) {
  const newest = status.recoveries.find((recovery) => recovery.seconds !== null);
  if (newestEnd !== undefined && newest && newest.at !== newestEnd) {
    byId("news").textContent = `${sentenceOf(newest)}, ${status.requests.failed} failed`;
  }
  newestEnd = newest?.at ?? null;
}

// Returns the path of the selected model's status. Until the list of models is read, the server uses its first model.
function statusPath() {
  const name = byId("model").value;
  return name ? `ui/status?model=${encodeURIComponent(name)}` : "ui/status";
}

// Reads the status, now and every second from then on. Without a valid API key it waits for another key.
async function readStatus() {
  isLocked = false;
  try {
    const response = await fetch(statusPath(), {
      headers: authorization(),
      cache: "no-store",
      signal: AbortSignal.timeout(READ_TIMEOUT_MS),
    });
    if (response.status === 401) {
      isLocked = true;
      byId("settings").open = true;
      showState("locked", "needs an API key");
      return;
    }
    if (response.status === 404) await loadModels(); // a gateway no longer has the selected model
    if (!response.ok) throw new Error(`status ${response.status}`);
    showStatus(await response.json());
    if (byId("model").options.length === 0) await loadModels();
  } catch {
    showState("unreachable", "the server does not answer");
  }
  setTimeout(readStatus, READ_EVERY_MS);
}

restoreSettings();
listenToChat();
byId("key").addEventListener("change", () => isLocked && readStatus());
readStatus();
