// The fields of the page. Their values are kept in the tab's session storage, which other tabs cannot read.

const byId = (id) => document.getElementById(id);
const SETTINGS = ["system", "temperature", "seed", "max_tokens", "tools", "key"];

function valueOf(id) {
  return byId(id).value.trim();
}

function restoreSettings() {
  for (const id of SETTINGS) {
    byId(id).value = sessionStorage.getItem(id) ?? "";
    byId(id).addEventListener("input", () => sessionStorage.setItem(id, byId(id).value));
  }
  // A phone's screen is too small for settings and messages at once.
  byId("settings").open = window.innerWidth > 704;
}

// Returns the headers of a request: the API key, if there is one.
function authorization() {
  const key = valueOf("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

// Returns the fields of a chat that the settings define. For an empty setting, the server's default applies.
function settingFields() {
  const fields = {};
  for (const id of ["temperature", "seed", "max_tokens"]) {
    if (valueOf(id)) fields[id] = Number(valueOf(id));
  }
  if (valueOf("tools")) fields.tools = toolsOf(valueOf("tools"));
  return fields;
}

function toolsOf(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The setting "Tools" is not JSON: ${error.message}`);
  }
}

// Returns the message of a refusal in OpenAI's error format, or the status if the body has another format.
async function refusalOf(response) {
  if (response.status === 401) byId("settings").open = true;
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// Fills the list of models. Throws an Error if the server refuses.
async function loadModels() {
  const response = await fetch("v1/models", { headers: authorization() });
  if (!response.ok) throw new Error(await refusalOf(response));
  const names = (await response.json()).data.map((model) => model.id);
  const select = byId("model");
  if (names.join("\n") !== Array.from(select.options, (option) => option.value).join("\n")) {
    select.replaceChildren(...names.map((name) => new Option(name, name)));
  }
}
