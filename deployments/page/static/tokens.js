// Which part of an answer's text is which token's, and where each token comes from.

/** [text, bytes of a character that is not complete yet] */
function decode(bytes) {
  const all = Uint8Array.from(bytes);
  const text = new TextDecoder().decode(all, { stream: true });
  for (let rest = 0; rest < 4; rest += 1) {
    const whole = all.subarray(0, all.length - rest);
    if (new TextDecoder().decode(whole) === text) return [text, bytes.slice(bytes.length - rest)];
  }
  return [text, []];
}

/**
 * Shares the text of an answer among its tokens. Text may come later than its tokens: what could begin a stop string is
 * held back. Tokens that are not shown, and those behind a stop, get none.
 */
export class Spelling {
  #text = "";
  #pending = [];
  #waiting = [];

  /** New text and tokens; yields [token, its text] of those whose text is known. The text is never lost. */
  add(text, tokens) {
    this.#text += text;
    this.#waiting.push(...tokens);
    const placed = [];
    while (this.#waiting.length) {
      const took = this.#take(this.#waiting[0]);
      if (took === undefined) return placed;
      placed.push([this.#waiting.shift(), took]);
    }
    // Text is never ahead of the tokens: what is left is of a token that the text spells otherwise.
    return this.#giveLast(placed);
  }

  /** The answer is complete: [token, text] of the rest. */
  end() {
    const placed = this.#waiting.map((token) => [token, ""]);
    this.#waiting = [];
    return this.#giveLast(placed);
  }

  #take(token) {
    const [text, rest] = decode([...this.#pending, ...token.bytes]);
    // Some tokenizers write no space before the first word.
    const found = [text, text.replace(/^ /, "")].find((said) => this.#text.startsWith(said));
    if (found === undefined && text.startsWith(this.#text)) return undefined;
    if (found === undefined) return "";
    this.#pending = rest;
    this.#text = this.#text.slice(found.length);
    return found;
  }

  #giveLast(placed) {
    if (placed.length && this.#text) {
      placed[placed.length - 1][1] += this.#text;
      this.#text = "";
    }
    return placed;
  }
}

/** The nodes that a round accepted, from the anchor on. */
export function path(round) {
  return round.nodes.filter((node) => node.accepted);
}

/** The committed tokens of a round, each with its `origin`: drafted (by whom), bonus or plain. */
export function withOrigins(round) {
  const accepted = path(round);
  return round.tokens.map((token, index) => {
    const node = accepted[index];
    if (node) return { ...token, origin: "drafted", drafters: node.drafters, score: node.score };
    return { ...token, origin: round.nodes.length ? "bonus" : "plain", drafters: [] };
  });
}

/** What a token looks like where it stands alone. */
export function label(text) {
  const seen = text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const clean = [...seen.replaceAll(/\p{Cc}/gu, "�")];
  return clean.length > 14 ? `${clean.slice(0, 13).join("")}…` : clean.join("") || "∅";
}

/** The tints of drafters, by their names. */
export class Tints {
  #numbers = new Map();

  constructor(drafters) {
    drafters.forEach((name, index) => this.#numbers.set(name, 1 + (index % 6)));
  }

  /** The class of what these drafters proposed. */
  of(drafters) {
    return drafters.length > 1 ? "several" : `drafter-${this.#numbers.get(drafters[0]) ?? 1}`;
  }
}
