// The page of a trace: plays a generation round by round. Its data is the JSON of `Trace.data`, in the element #trace.
// Text of the data enters the page as text nodes and attributes only. A step changes what belongs to its round: of the
// answer, all tokens are in the page from the start, and a step shows or hides those of the rounds between.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("trace").textContent);
  const { vocab, output, rounds, stats, plain } = data;
  const $ = (id) => document.getElementById(id);
  const PARTS = {
    draft: "draft",
    target: "target’s forward pass",
    processors: "logits processors",
    verify: "acceptance rule",
    cache: "KV cache",
    host: "host",
    other: "not measured by part",
  };
  const FALLBACKS = {
    slower: "drafts were slower than plain steps here",
    drafter_failed: "the drafter failed",
    large_batch: "the batch was too large for drafts to pay",
    out_of_memory: "memory was short",
    not_finite: "the target's numbers for a draft were not finite",
    segment_border: "the target computes tokens in another way from a position that the drafts would reach",
  };
  const COLOURS = 8; // of depths, see page.css; deeper ones start again, their number tells them apart

  // ---------------------------------------------------------------- elements and words

  function el(tag, attributes = {}, ...content) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
    }
    made.append(...content.filter((each) => each !== null && each !== undefined && each !== ""));
    return made;
  }

  function svg(tag, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  const colour = (depth) => (depth > 0 ? `d${((depth - 1) % COLOURS) + 1}` : "own");
  const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;
  const percent = (part, whole) => `${whole > 0 ? (100 * part) / whole : 0}%`;
  const fixed = (value, digits) => (value === null || !Number.isFinite(value) ? "–" : value.toFixed(digits));
  const milliseconds = (value) => `${value < 0.995 ? value.toFixed(2) : value < 99.95 ? value.toFixed(1) : value.toFixed(0)} ms`;

  function probability(value) {
    if (value === null || value === undefined) return "–";
    if (value === 0 || value === 1) return String(value);
    if (value >= 0.9995) return "≈ 1";
    if (value >= 0.0995) return value.toFixed(value > 0.995 ? 3 : 2);
    return value >= 0.00095 ? value.toFixed(3) : value.toExponential(0).replace("e-", "e−");
  }

  // Two numbers with as many digits as it takes to see which is the larger one.
  function compared(left, right) {
    const [a, b] = [probability(left), probability(right)];
    return a !== b || left === right ? [a, b] : [left.toPrecision(4), right.toPrecision(4)];
  }

  const MARKS = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

  function mark(character) {
    if (MARKS[character]) return MARKS[character];
    const code = character.codePointAt(0);
    if (code < 32) return String.fromCodePoint(0x2400 + code);
    const unseen = code === 0x7f || code === 0xa0 || code === 0xad || code === 0xfeff;
    const control = (code >= 0x80 && code < 0xa0) || (code >= 0x200b && code < 0x2010 && code !== 0x200d);
    const bidi = (code >= 0x2028 && code < 0x202f) || (code >= 0x2060 && code < 0x2070);
    return unseen || control || bidi ? `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩` : null;
  }

  // A token's text with everything invisible in it made visible.
  const BYTES = /^⟨[0-9A-F]{2}( [0-9A-F]{2})*⟩$/; // of a token that is no whole character
  const visible = (text) => (text === "" ? "∅" : BYTES.test(text) ? text : Array.from(text, (each) => mark(each) ?? each).join(""));
  const word = (token) => visible(vocab[token].t);
  const quoted = (token) => `“${word(token)}”`;

  // The same as an element, isolated from the direction of what surrounds it; marks are dimmed.
  function chip(token) {
    const made = el("bdi", { class: "tok" });
    let run = "";
    for (const each of vocab[token].t || "∅") {
      const sign = BYTES.test(vocab[token].t) ? null : mark(each);
      if (sign === null) {
        run += each;
        continue;
      }
      made.append(run, el("i", {}, sign));
      run = "";
    }
    made.append(run);
    return made;
  }

  // ---------------------------------------------------------------- what is known before the first step

  const total = rounds.length;
  const depths = stats.acceptance_rate_by_depth.length;
  const facts = rounds.map((round) => {
    const depth = [0];
    const children = round.nodes.map(() => []);
    for (let node = 1; node < round.nodes.length; node++) {
      const parent = round.nodes[node].u;
      depth[node] = depth[parent] + 1;
      children[parent].push(node);
    }
    const path = round.nodes.flatMap((node, index) => (node.s === 1 ? [index] : []));
    const accepted = path.length - 1;
    return {
      depth,
      children,
      path,
      last: path[path.length - 1],
      accepted,
      truncated: round.emitted <= accepted,
      drafted: Math.max(...depth),
      chain: children.every((each) => each.length < 2),
    };
  });

  // Sums over the first k rounds, by the definitions of the class Stats.
  const sums = [{ ms: 0, tokens: 0, plain: 0, reached: Array(depths).fill(0), accepted: Array(depths).fill(0) }];
  rounds.forEach((round, index) => {
    const { accepted, truncated, drafted } = facts[index];
    const before = sums[index];
    const kept = Math.min(accepted, round.emitted);
    sums.push({
      ms: before.ms + round.ms,
      tokens: before.tokens + round.emitted,
      plain: before.plain + (drafted === 0),
      reached: before.reached.map((value, depth) => value + (depth < kept || (depth === kept && !truncated))),
      accepted: before.accepted.map((value, depth) => value + (depth < kept)),
    });
  });

  const shownAfter = Array(total).fill(0); // tokens of the answer that are there after round k
  output.forEach((token) => {
    if (total) shownAfter[Math.max(token.r, 0)]++;
  });
  for (let index = 1; index < total; index++) shownAfter[index] += shownAfter[index - 1];

  // Why each node stands or falls: a few words for its box, and a sentence.
  function verdicts(index) {
    const round = rounds[index];
    const { last, truncated, path } = facts[index];
    const own = round.nodes.length;
    const brief = Array(own + 1).fill("");
    const full = Array(own + 1).fill("");
    const trial = new Map();
    const choice = new Map();
    for (const draw of round.draws) {
      if (draw.kind === "accept" || draw.kind === "typical") trial.set(draw.c, draw);
      else choice.set(draw.n, draw);
    }
    brief[0] = "newest token";
    full[0] = "the newest token of the text: the draft starts from it";
    for (let node = 1; node < own; node++) {
      const { s, u } = round.nodes[node];
      const tried = trial.get(node);
      const chosen = choice.get(u);
      if (s === -1) {
        full[node] = "never reached: the path ended before it";
      } else if (tried && tried.kind === "accept") {
        const [number, limit] = compared(tried.u, tried.limit);
        if (tried.ok) {
          brief[node] = tried.limit >= 1 ? "limit 1: certain" : `${number} < ${limit}`;
          full[node] = `accepted: the random number ${number} is below the acceptance probability ${limit}`;
        } else {
          const sign = tried.u === tried.limit ? "=" : ">";
          brief[node] = tried.limit === 0 ? "limit 0" : `${number} ${sign} ${limit}`;
          full[node] = `rejected: the random number ${number} is not below the acceptance probability ${limit}`;
        }
      } else if (tried) {
        const [number, limit] = compared(tried.u, tried.limit);
        brief[node] = `${number} ${tried.ok ? ">" : "≤"} ${limit}`;
        full[node] = tried.ok
          ? `plausible: the target’s probability ${number} is above the threshold ${limit}`
          : `rejected: the target’s probability ${number} is not above the threshold ${limit}`;
        if (tried.ok && s === 0) {
          brief[node] = "other path won";
          full[node] += ", but a longer or likelier path won";
        }
      } else if (s === 1) {
        const best = chosen && chosen.kind === "best";
        brief[node] = chosen ? (best ? "target’s best" : "target drew it") : "kept with its path";
        full[node] = chosen
          ? `accepted: it is ${best ? "the target’s best token" : "what the target drew"}`
          : "accepted together with the path below it";
      } else if (chosen) {
        const best = chosen.kind === "best";
        const token = chosen.c === null || chosen.c === undefined ? round.next : round.nodes[chosen.c].v;
        brief[node] = `${best ? "best" : "drew"}: ${word(token)}`;
        full[node] = `rejected: the target’s ${best ? "best token is" : "draw was"} ${quoted(token)}`;
      } else {
        brief[node] = "rejected";
        full[node] = "rejected";
      }
    }
    path.forEach((node, place) => {
      if (place > round.emitted) full[node] += "; the answer had ended before it";
    });
    const draw = choice.get(last);
    if (truncated) {
      brief[own] = "not needed";
      full[own] = "not returned: the answer ended before it";
    } else if (round.residual) {
      brief[own] = "from the residual";
      full[own] = "drawn from the residual, since a draft was rejected here";
    } else if (!draw || draw.kind === "best") {
      brief[own] = "target’s best";
      full[own] = "the target’s best token here";
    } else {
      brief[own] = "target drew it";
      full[own] = "drawn from the target’s distribution";
    }
    return { brief, full, trial };
  }

  // ---------------------------------------------------------------- the answer, built once

  const spans = [];

  function buildText() {
    $("prompt").textContent = data.prompt;
    let paragraph = null;
    output.forEach((token, index) => {
      if (!paragraph) {
        paragraph = el("div", { class: "par off", dir: "auto" });
        $("answer").append(paragraph);
      }
      const span = el("span", { class: `t off ${colour(token.d)}${token.d > 9 ? " deep" : ""}${/^[!-/:-@[-`{-~]$/.test(token.p) ? " thin" : ""}`, "data-i": index });
      if (token.d > 0) span.dataset.d = token.d;
      if (token.p === "") span.dataset.mark = visible(vocab[token.v].t);
      else if (!token.p.includes("\n") && Array.from(token.p).every(mark)) span.dataset.mark = visible(token.p);
      if (/[\u202a-\u202e\u2066-\u2069]/.test(token.p)) span.classList.add("isolated");
      token.p.split("\n").forEach((line, place) => {
        if (place) span.append(el("span", { class: "nl" }, el("i", { "data-d": token.d > 0 && token.d }), "\n"));
        if (line) span.append(line);
      });
      paragraph.append(span);
      spans.push(span);
      if (token.p.endsWith("\n")) paragraph = null;
    });
  }

  let shown = 0;
  let current = [0, 0];

  function showText(round) {
    const wanted = total ? shownAfter[round] : output.length;
    for (; shown < wanted; shown++) {
      spans[shown].classList.remove("off");
      spans[shown].parentNode.classList.remove("off");
    }
    for (; shown > wanted; shown--) {
      const span = spans[shown - 1];
      span.classList.add("off");
      if (span === span.parentNode.firstChild) span.parentNode.classList.add("off");
    }
    for (let index = current[0]; index < current[1]; index++) spans[index].classList.remove("now");
    current = [round > 0 ? shownAfter[round - 1] : output.filter((token) => token.r < 0).length, wanted];
    for (let index = current[0]; index < current[1]; index++) spans[index].classList.add("now");
    const box = $("text");
    if (wanted && box.scrollHeight > box.clientHeight) {
      const lines = spans[wanted - 1].getClientRects();
      if (lines.length) {
        const line = lines[lines.length - 1];
        const frame = box.getBoundingClientRect();
        if (line.bottom > frame.bottom - 24) box.scrollTop += line.bottom - frame.bottom + 40;
        else if (line.top < frame.top) box.scrollTop -= frame.top - line.top + 40;
      }
    }
  }

  // ---------------------------------------------------------------- the tree of a round

  let verdict = { brief: [], full: [], trial: new Map() };
  let boxes = [];
  let pinned = 0;
  let pointed = null;

  const ownNode = () => rounds[now].nodes.length;
  const parentOf = (node) => (node === ownNode() ? facts[now].last : rounds[now].nodes[node].u);
  const depthOf = (node) => (node === ownNode() ? facts[now].depth[facts[now].last] + 1 : facts[now].depth[node]);
  const tokenOf = (node) => (node === ownNode() ? rounds[now].next : rounds[now].nodes[node].v);

  // Positions of boxes: columns by depth, or on a narrow screen rows, indented by depth.
  function arrange(index, width, scale) {
    const round = rounds[index];
    const { children, depth, last, drafted } = facts[index];
    const own = round.nodes.length;
    const below = (node) => (node === own ? [] : node === last ? [...children[node], own] : children[node]);
    const status = (node) => (node === own ? 1 : round.nodes[node].s);
    const narrow = width < 560 * scale;
    const dense = round.nodes.filter((node) => node.s === 0).length > 8;
    const high = (node) => (status(node) === -1 ? 27 : narrow || (dense && status(node) === 0) ? 46 : 58) * scale;
    const level = (node) => (node === own ? depth[last] + 1 : depth[node]);
    const places = [];
    const order = [];
    if (narrow) {
      const indent = Math.min(18 * scale, (width * 0.4) / (drafted + 2));
      let top = 0;
      const walk = (node) => {
        const left = level(node) * indent;
        places[node] = { x: left, y: top, w: width - left, h: high(node) };
        order.push(node);
        top += high(node) + 6 * scale;
        below(node).forEach(walk);
      };
      walk(0);
      return { places, order, narrow, dense, width, height: top, columns: 0 };
    }
    const columns = Math.max(drafted + 1, depth[last] + 2);
    const gap = (columns > 6 ? 22 : 30) * scale;
    const box = Math.max((columns > 7 ? 104 : 90) * scale, Math.min(158 * scale, (width - gap * (columns - 1)) / columns));
    const room = [];
    const measure = (node) => {
      const inside = below(node).reduce((sum, child) => sum + measure(child), 0);
      room[node] = Math.max(high(node) + 8 * scale, inside);
      return room[node];
    };
    measure(0);
    const set = (node, top) => {
      const inside = below(node).reduce((sum, child) => sum + room[child], 0);
      const y = top + (room[node] - high(node)) / 2;
      places[node] = { x: level(node) * (box + gap), y: y + 24 * scale, w: box, h: high(node) };
      order.push(node);
      let next = top + (room[node] - inside) / 2;
      for (const child of below(node)) {
        set(child, next);
        next += room[child];
      }
    };
    set(0, 0);
    return { places, order, narrow, dense, width: columns * (box + gap) - gap, height: room[0] + 24 * scale, columns, box, gap };
  }

  function drawTree(focused) {
    const tree = $("tree");
    const round = rounds[now];
    const { depth, last, accepted } = facts[now];
    const own = ownNode();
    const scale = parseFloat(getComputedStyle(document.documentElement).fontSize) / 16;
    const { places, order, narrow, dense, width, height, columns, box, gap } = arrange(now, $("tree-frame").clientWidth - 14 * scale, scale);
    tree.className = narrow ? "narrow" : columns > 6 ? "wide many" : "wide";
    tree.style.width = `${width}px`;
    tree.style.height = `${height}px`;
    tree.setAttribute("aria-label", `Draft tree of round ${now + 1}`);
    const lines = svg("svg", { width, height, "aria-hidden": "true" });
    const made = [lines];
    for (let column = 0; column < columns; column++) {
      const label = el("span", { class: `column ${column ? colour(column) : ""}`, "aria-hidden": "true" });
      label.textContent = column === 0 || column > facts[now].drafted ? "" : columns > 8 ? column : `depth ${column}`;
      label.style.left = `${column * (box + gap)}px`;
      label.style.width = `${box}px`;
      made.push(label);
    }
    boxes = [];
    for (const node of order) {
      const isOwn = node === own;
      const state = isOwn ? (facts[now].truncated ? "own unneeded" : "own") : { 1: "accepted", 0: "rejected" }[round.nodes[node].s] ?? "unreached";
      const { x, y, w, h } = places[node];
      if (node) {
        const from = places[parentOf(node)];
        const [x1, y1, x2, y2] = narrow
          ? [from.x + 7 * scale, from.y + from.h, x, y + h / 2]
          : [from.x + from.w, from.y + from.h / 2, x, y + h / 2];
        const middle = (x1 + x2) / 2;
        const shape = narrow ? `M${x1} ${y1}V${y2}H${x2}` : `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`;
        const line = svg("path", { d: shape, class: `${state} ${colour(isOwn ? 0 : depth[node])}` });
        if (state === "accepted" || isOwn) lines.append(line);
        else lines.prepend(line);
      }
      const { q, p } = isOwn ? chances(last, round.next) : round.nodes[node];
      const sign = isOwn ? "●" : { accepted: node ? "✓" : "", rejected: "✗", unreached: "" }[state];
      const told = [["Draft", q], ["Target", p]].map(([name, value]) => (node && value !== null ? ` ${name} probability ${probability(value)}.` : "")).join("");
      const item = el(
        "div",
        {
          class: `node ${state} ${node ? colour(isOwn ? 0 : depth[node]) : "root"}`,
          role: "treeitem",
          "aria-level": depthOf(node) + 1,
          "aria-selected": "false",
          "aria-label": `${quoted(tokenOf(node))}, ${isOwn ? "the target’s own token" : node ? `depth ${depth[node]}` : "newest token"}.${told} ${verdict.full[node]}`,
          tabindex: "-1",
          "data-n": node,
        },
        el("span", { class: "line" }, chip(tokenOf(node)), el("span", { class: "sign" }, sign), node && !isOwn ? el("b", { class: "depth" }, depth[node]) : null),
        node && (narrow || (state !== "unreached" && !(dense && state === "rejected"))) ? el("span", { class: "chances" }, q === null ? null : el("span", {}, `q ${probability(q)}`), p === null ? null : el("span", {}, `p ${probability(p)}`)) : null,
        state !== "unreached" ? el("span", { class: "why" }, verdict.brief[node]) : null,
      );
      item.style.cssText = `left:${x}px;top:${y}px;width:${w}px;height:${h}px`;
      boxes[node] = item;
      made.push(item);
    }
    tree.replaceChildren(...made);
    tree.setAttribute("aria-description", `${plural(own - 1, "drafted token")}, ${accepted} accepted`);
    const frame = $("tree-frame");
    const end = places[own];
    frame.scrollLeft = Math.max(0, end.x + end.w - frame.clientWidth + 8);
    frame.scrollTop = Math.max(0, end.y + end.h / 2 - frame.clientHeight / 2);
    pinned = order.includes(pinned) ? pinned : own;
    select(pinned);
    if (focused) boxes[pinned].focus({ preventScroll: true });
  }

  // Draft and target probability of a token after a node, as far as the ten best tell.
  function chances(node, token) {
    const found = (list) => (list ? list.find(([each]) => each === token)?.[1] ?? null : null);
    return { q: found(rounds[now].draft[node]), p: found(rounds[now].best[node]) };
  }

  function select(node) {
    boxes.forEach((item, index) => {
      const on = index === node;
      if (item.getAttribute("aria-selected") === String(on)) return;
      item.setAttribute("aria-selected", String(on));
    });
    boxes.forEach((item, index) => item.setAttribute("tabindex", index === pinned ? "0" : "-1"));
    drawBest(node);
  }

  // ---------------------------------------------------------------- the ten best, draws, residual, time

  function bar(value, kind) {
    const made = el("span", { class: `meter ${kind}`, "aria-hidden": "true" }, el("i"));
    made.firstChild.style.width = percent(Math.min(value ?? 0, 1), 1);
    return made;
  }

  function drawBest(node) {
    const round = rounds[now];
    const own = ownNode();
    const place = node === 0 ? 0 : parentOf(node);
    const draft = round.draft[place];
    const best = round.best[place];
    const depth = facts[now].depth[place] + 1;
    const most = Math.max(draft?.length ?? 0, best?.length ?? 0) || 10;
    $("best-title").replaceChildren("What could follow ", chip(round.nodes[place].v), `: the ${most === 10 ? "ten" : most} best`);
    const known = node ? [chip(tokenOf(node)), node === own ? ", the target’s own: " : `, drafted at depth ${depth}: `, `${verdict.full[node]}.`] : [`Before any draft: ${verdict.full[0]}.`];
    $("best-note").replaceChildren(...known);
    const rows = new Map();
    const row = (token) => rows.get(token) ?? rows.set(token, { q: null, p: null }).get(token);
    for (const [token, q] of draft ?? []) row(token).q = q;
    for (const [token, p] of best ?? []) row(token).p = p;
    const fates = new Map();
    for (const child of facts[now].children[place]) {
      const { v, q, p, s } = round.nodes[child];
      if (!rows.has(v)) Object.assign(row(v), { q, p });
      else if (rows.get(v).p === null) rows.get(v).p = p;
      if (!fates.has(v) || s === 1) fates.set(v, s === 1 ? "✓" : s === 0 ? "✗" : "·");
    }
    if (place === facts[now].last) {
      row(round.next);
      fates.set(round.next, "●");
    }
    const top = Math.max(0.05, ...Array.from(rows.values(), ({ q, p }) => Math.max(q ?? 0, p ?? 0)));
    const ordered = Array.from(rows).sort(([, a], [, b]) => Math.max(b.p ?? 0, b.q ?? 0) - Math.max(a.p ?? 0, a.q ?? 0));
    const missing = (list) => (list ? "below the ten best" : "not recorded");
    const cell = (value, kind, list) => {
      const number = el("span", { class: "number", title: value === null ? missing(list) : null }, value === null ? "·" : probability(value));
      return el("td", { class: kind }, el("span", { class: "flex" }, number, value === null ? null : bar(value / top, kind)));
    };
    const made = ordered.map(([token, { q, p }]) =>
      el(
        "tr",
        { class: [node && token === tokenOf(node) ? "here" : "", fates.get(token) === "✓" ? "stands" : ""].join(" ").trim() || null },
        cell(q, `draft ${colour(depth)}`, draft),
        el("th", { scope: "row" }, chip(token), el("span", { class: "sign" }, fates.get(token) ?? "")),
        cell(p, "target", best),
      ),
    );
    const table = $("best");
    table.hidden = made.length === 0;
    table.classList.toggle("no-draft", !draft);
    table.tBodies[0].replaceChildren(...made);
    if (!best) $("best-note").append(" The target’s distribution here is not kept in this trace.");
    else if (!draft && facts[now].children[place].length) $("best-note").append(" This draft is looked up and has no probabilities.");
  }

  function drawDraws() {
    const round = rounds[now];
    const { last } = facts[now];
    const items = [];
    let hopeless = []; // tokens in a row that could not be accepted
    const flush = () => {
      if (!hopeless.length) return;
      const tokens = hopeless.slice(0, 4).flatMap((token, place) => [place ? ", " : "", chip(token)]);
      const more = hopeless.length > 4 ? ` and ${hopeless.length - 4} more` : "";
      items.push(el("li", { class: "no" }, el("span", { class: "sign", "aria-hidden": "true" }, "✗"), el("span", {}, ...tokens, `${more}: rejected, with an acceptance probability of 0.`)));
      hopeless = [];
    };
    for (const draw of round.draws) {
      if (draw.kind === "accept" && draw.limit === 0) {
        hopeless.push(round.nodes[draw.c].v);
        continue;
      }
      flush();
      const lastOne = draw === round.draws[round.draws.length - 1];
      if (draw.c !== null && draw.c !== undefined) {
        const node = round.nodes[draw.c];
        const ok = node.s === 1 && draw.ok !== false;
        items.push(
          el("li", { class: `${ok ? "yes" : "no"} ${colour(facts[now].depth[draw.c])}` }, el("span", { class: "sign", "aria-hidden": "true" }, ok ? "✓" : "✗"), el("span", {}, chip(node.v), ` after `, chip(round.nodes[draw.n].v), `: ${verdict.full[draw.c]}${race(draw)}.`)),
        );
      } else if (draw.n === last || lastOne) {
        const children = facts[now].children[last].filter((child) => round.nodes[child].s === 0 && !verdict.trial.has(child));
        const instead = children.length ? [" (drafted was ", ...children.slice(0, 3).flatMap((child, place) => [place ? ", " : "", chip(round.nodes[child].v)]), children.length > 3 ? ` and ${children.length - 3} more` : "", ")"] : [];
        items.push(el("li", { class: "own" }, el("span", { class: "sign", "aria-hidden": "true" }, "●"), el("span", {}, chip(round.next), " after ", chip(round.nodes[last].v), `: ${verdict.full[round.nodes.length]}`, ...instead, `${race(draw)}.`)));
      }
    }
    flush();
    $("draws").replaceChildren(...items);
  }

  // Point mass draws are races, or a walk along the cumulative distribution.
  function race(draw) {
    if (draw.kind !== "sample" || draw.u === undefined) return "";
    if (draw.time !== undefined && draw.time !== null) return `, first in the race at time ${draw.time.toPrecision(3)}`;
    return draw.u === null ? "" : `, by the random number ${probability(draw.u)}`;
  }

  function drawResidual() {
    const round = rounds[now];
    $("residual-part").hidden = !round.residual;
    if (!round.residual) return;
    const top = Math.max(...round.residual.map(([, value]) => value));
    $("residual-note").replaceChildren("What the draft gave too little of: max(p − q, 0), scaled to sum 1. Drawn: ", chip(round.next), ".");
    const listed = round.residual.some(([token]) => token === round.next) ? round.residual : [...round.residual, [round.next, null]];
    $("residual").tBodies[0].replaceChildren(
      ...listed.map(([token, value]) =>
        el(
          "tr",
          { class: token === round.next ? "here" : null },
          el("th", { scope: "row" }, chip(token), el("span", { class: "sign" }, token === round.next ? "●" : "")),
          el("td", { class: "target" }, el("span", { class: "flex" }, bar(value === null ? 0 : value / top, "target"), el("span", { class: "number" }, value === null ? "·" : probability(value)))),
        ),
      ),
    );
  }

  // Stacked bar of a round's time by part; beneath it, on the same scale, plain steps for as many tokens.
  function timeBar(place, ms, parts, tokens) {
    const known = Object.keys(PARTS).filter((part) => parts[part] > 0).map((part) => [part, parts[part]]);
    const rest = ms - known.reduce((sum, [, value]) => sum + value, 0);
    if (rest > 0.01 * ms) known.push(["other", rest]);
    const slow = plain ? plain.ms_per_token * tokens : 0;
    const scale = Math.max(ms, slow);
    const stack = el("div", { class: "stack", "aria-hidden": "true" });
    for (const [part, value] of known) {
      const piece = el("i", { class: `part-${part}` }, value > 0.16 * scale ? part : "");
      piece.style.width = percent(value, scale);
      stack.append(piece);
    }
    const made = [el("p", { class: "bar-name" }, el("b", {}, milliseconds(ms)), tokens === 1 ? " for 1 token" : ` for ${Number.isInteger(tokens) ? tokens : tokens.toFixed(2)} tokens`), stack];
    if (plain) {
      const steps = el("div", { class: "stack plain", "aria-hidden": "true" });
      for (let left = tokens; left > 1e-9; left--) {
        const step = el("i");
        step.style.width = percent(Math.min(left, 1) * plain.ms_per_token, scale);
        steps.append(step);
      }
      made.push(steps, el("p", { class: "bar-name" }, el("b", {}, milliseconds(slow)), ` by plain decoding, ${milliseconds(plain.ms_per_token)} a token`));
    }
    const list = el("ul", { class: "parts" });
    for (const [part, value] of known) {
      list.append(el("li", {}, el("i", { class: `part-${part}`, "aria-hidden": "true" }), PARTS[part], " ", el("b", {}, milliseconds(value))));
    }
    place.replaceChildren(...made, list);
  }

  // ---------------------------------------------------------------- sentence and counts

  function sentence() {
    const round = rounds[now];
    const { accepted, drafted, truncated, chain } = facts[now];
    const nodes = round.nodes.length - 1;
    const own = chip(round.next);
    if (nodes === 0) {
      const why = round.fallback ? ` (${FALLBACKS[round.fallback] ?? round.fallback})` : "";
      return [`No drafts in this round${why}: one plain step, which gives the target’s own `, own, "."];
    }
    const draft = chain ? `${plural(nodes, "token")} drafted` : `${plural(nodes, "token")} drafted, ${drafted} deep`;
    if (truncated) return [`${draft}, ${accepted} accepted. The answer ends here, with ${plural(round.emitted, "token")} of this round.`];
    const tokens = `${plural(round.emitted, "token")} for one forward pass of the target.`;
    if (accepted === 0) return [`${draft}, none accepted: the target’s own `, own, ` stands instead. ${tokens}`];
    return [`${draft}, ${accepted === nodes ? (nodes === 1 ? "and accepted" : "all accepted") : `${accepted} accepted`}, then the target’s own `, own, `. ${tokens}`];
  }

  const speed = (tokens, ms) => (ms > 0 ? (1000 * tokens) / ms : null);
  const faster = (rate) => (plain && rate !== null ? (rate * plain.ms_per_token) / 1000 : null);
  const counts = {};
  const bars = [];
  const ratio = (value) => (value === null ? "–" : `${fixed(value, 2)}×`);

  function buildCounts() {
    const whole = stats.tokens_per_second;
    const spread = stats.interval ? ` (${fixed(stats.interval[0], 2)} to ${fixed(stats.interval[1], 2)})` : "";
    const rows = [
      ["rounds", "Rounds", stats.rounds],
      ["plain_rounds", "… without drafts", stats.plain_rounds],
      ["tokens", "Tokens of rounds", stats.tokens],
      ["acceptance_length", "Tokens a round (acceptance length τ)", fixed(stats.acceptance_length, 2) + spread],
      ["tokens_per_second", "Tokens a second", fixed(whole, 1)],
      ["speed", "Speed against plain steps", ratio(faster(whole))],
      ["prefill_ms", "Prefill, which gives the first token", milliseconds(stats.prefill_ms)],
    ].filter(([name]) => name !== "speed" || plain);
    for (const [name, title, value] of rows) {
      counts[name] = el("td", { "data-so-far": name });
      $("counts").tBodies[0].append(el("tr", {}, el("th", { scope: "row" }, title), counts[name], el("td", { "data-stat": name }, value)));
    }
    counts.prefill_ms.textContent = milliseconds(stats.prefill_ms);
    const tiles = [[fixed(stats.acceptance_length, 2), "tokens a round"]];
    if (plain) tiles.push([ratio(faster(whole)), "the speed of plain steps"]);
    tiles.push([fixed(whole, 1), "tokens a second"]);
    $("tiles").append(...tiles.map(([number, title]) => el("p", {}, el("b", {}, number), " ", title)));
    stats.acceptance_rate_by_depth.forEach((rate, depth) => {
      const track = el("span", { class: `meter rate ${colour(depth + 1)}`, "aria-hidden": "true" }, el("i"), rate === null ? null : el("u"));
      if (rate !== null) track.lastChild.style.insetInlineStart = percent(rate, 1);
      const far = el("td", { "data-rate-so-far": depth });
      bars.push({ far, fill: track.firstChild });
      $("depths").tBodies[0].append(el("tr", {}, el("th", { scope: "row" }, el("b", { class: `depth ${colour(depth + 1)}` }, depth + 1)), el("td", {}, track), far, el("td", { "data-rate": depth }, fixed(rate, 2))));
    });
    if (!depths) $("depths").replaceWith(el("p", { class: "note" }, "No drafts in this generation."));
    if (total) timeBar($("mean"), sums[total].ms / total, stats.parts_ms, stats.acceptance_length);
  }

  function drawCounts() {
    const sum = sums[now + 1];
    const rate = speed(sum.tokens, sum.ms);
    counts.rounds.textContent = now + 1;
    counts.plain_rounds.textContent = sum.plain;
    counts.tokens.textContent = sum.tokens;
    counts.acceptance_length.textContent = fixed(sum.tokens / (now + 1), 2);
    counts.tokens_per_second.textContent = fixed(rate, 1);
    if (counts.speed) counts.speed.textContent = ratio(faster(rate));
    bars.forEach(({ far, fill }, depth) => {
      const value = sum.reached[depth] ? sum.accepted[depth] / sum.reached[depth] : null;
      far.textContent = fixed(value, 2);
      fill.style.width = percent(value ?? 0, 1);
    });
  }

  // ---------------------------------------------------------------- stepping and playing

  let now = -1;
  let timer = null;

  function go(index, { node = null, quiet = false } = {}) {
    if (!total) return;
    const wanted = Math.max(0, Math.min(total - 1, index));
    if (wanted !== now) {
      const focused = $("tree").contains(document.activeElement);
      now = wanted;
      verdict = verdicts(now);
      pinned = node ?? ownNode();
      pointed = null;
      const words = sentence();
      $("round-title").textContent = `Round ${now + 1}`;
      $("sentence").replaceChildren(...words);
      showText(now);
      drawTree(focused);
      drawDraws();
      drawResidual();
      timeBar($("time"), rounds[now].ms, rounds[now].parts, rounds[now].emitted);
      drawCounts();
      $("slider").value = now + 1;
      $("slider").setAttribute("aria-valuetext", `Round ${now + 1} of ${total}`);
      $("where").textContent = `Round ${now + 1} of ${total}`;
      $("rounds").lastElementChild.setAttribute("x", now - 0.5);
      for (const id of ["first", "back"]) $(id).setAttribute("aria-disabled", String(now === 0));
      for (const id of ["next", "last"]) $(id).setAttribute("aria-disabled", String(now === total - 1));
    } else if (node !== null) {
      pinned = node;
      select(node);
    }
    if (!quiet) $("live").textContent = `Round ${now + 1}: ${$("sentence").textContent}`;
  }

  function pause() {
    if (timer === null) return;
    clearTimeout(timer);
    timer = null;
    showPlaying();
    $("live").textContent = `Paused. Round ${now + 1}: ${$("sentence").textContent}`;
  }

  function showPlaying() {
    const on = timer !== null;
    $("play-word").textContent = on ? "Pause" : "Play";
    $("play").classList.toggle("playing", on);
  }

  function play() {
    if (!total) return;
    if (now === total - 1) go(0, { quiet: true });
    const next = () => {
      if (now === total - 1) return pause();
      go(now + 1, { quiet: true });
      plan();
    };
    const plan = () => {
      const chosen = $("speed").value;
      const upcoming = rounds[Math.min(now + 1, total - 1)];
      timer = setTimeout(next, chosen === "real" ? upcoming.ms : 1000 / Number(chosen));
    };
    plan();
    showPlaying();
  }

  const step = (by) => {
    pause();
    go(now + by);
  };

  function buildPlayer() {
    const slider = $("slider");
    slider.max = Math.max(total, 1);
    slider.addEventListener("input", () => {
      pause();
      go(Number(slider.value) - 1);
    });
    $("first").addEventListener("click", () => step(-total));
    $("back").addEventListener("click", () => step(-1));
    $("next").addEventListener("click", () => step(1));
    $("last").addEventListener("click", () => step(total));
    $("play").addEventListener("click", () => (timer === null ? play() : pause()));
    const most = Math.max(1, ...rounds.map((round) => round.emitted));
    const span = Math.max(total - 1, 1);
    $("rounds").setAttribute("viewBox", `0 0 ${span} ${most}`);
    $("rounds").firstElementChild.setAttribute("d", rounds.map((round, index) => `M${index - 0.4} ${most}v${-round.emitted}h0.8v${round.emitted}z`).join(""));
    $("rounds").lastElementChild.setAttribute("height", most);
    $("rounds").lastElementChild.setAttribute("width", 1);
    document.addEventListener("keydown", (event) => {
      if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
      const at = event.target;
      if (at.closest("input, select, textarea")) {
        if (event.key !== " " || !at.closest("input")) return;
      } else if (at.closest("button, a") && (event.key === " " || event.key === "Enter")) return;
      const keys = { ArrowRight: () => step(1), ArrowLeft: () => step(-1), Home: () => step(-total), End: () => step(total), " ": () => (timer === null ? play() : pause()) };
      if (!Object.hasOwn(keys, event.key)) return;
      event.preventDefault();
      keys[event.key]();
    });
  }

  function buildTree() {
    const tree = $("tree");
    const nodeAt = (target) => target.closest?.("[data-n]");
    tree.addEventListener("pointerover", (event) => {
      const item = nodeAt(event.target);
      if (!item || Number(item.dataset.n) === pointed) return;
      pointed = Number(item.dataset.n);
      select(pointed);
    });
    tree.addEventListener("pointerleave", () => {
      if (pointed !== null && pointed !== pinned) select(pinned);
      pointed = null;
    });
    tree.addEventListener("focusin", (event) => {
      const item = nodeAt(event.target);
      if (!item) return;
      pinned = Number(item.dataset.n);
      select(pinned);
    });
    tree.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const order = Array.from(tree.querySelectorAll("[data-n]"), (item) => Number(item.dataset.n));
      const place = order.indexOf(pinned);
      const own = ownNode();
      const below = pinned === own ? [] : [...facts[now].path.filter((node) => node && parentOf(node) === pinned), ...facts[now].children[pinned], ...(pinned === facts[now].last ? [own] : [])];
      const wanted = {
        ArrowDown: () => order[place + 1],
        ArrowUp: () => order[place - 1],
        ArrowLeft: () => (pinned ? parentOf(pinned) : undefined),
        ArrowRight: () => below[0],
        Home: () => order[0],
        End: () => order[order.length - 1],
      }[event.key];
      if (!wanted) return;
      event.preventDefault();
      const node = wanted();
      if (node !== undefined) boxes[node].focus();
    });
    let width = 0;
    new ResizeObserver(() => {
      const measured = $("tree-frame").clientWidth;
      if (measured === width || now < 0) return;
      width = measured;
      drawTree($("tree").contains(document.activeElement));
    }).observe($("tree-frame"));
  }

  function nodeOf(token) {
    return token.d > 0 ? facts[token.r].path[token.d] : rounds[token.r].nodes.length;
  }

  function buildTokens() {
    const at = (event) => event.target.closest("[data-i]");
    $("answer").addEventListener("click", (event) => {
      const span = at(event);
      if (!span) return;
      pause();
      const token = output[Number(span.dataset.i)];
      if (token.r < 0) go(0, { node: 0 });
      else go(token.r, { node: nodeOf(token) });
    });
    $("answer").addEventListener("pointerover", (event) => {
      const span = at(event);
      if (!span || span.title) return;
      const token = output[Number(span.dataset.i)];
      const from = token.d > 0 ? `drafted at depth ${token.d}` : "the target’s own";
      span.title = token.r < 0 ? `${quoted(token.v)}: from the prefill` : `${quoted(token.v)}: round ${token.r + 1}, ${from}`;
    });
  }

  // ---------------------------------------------------------------- the race

  function buildRace() {
    if (!plain || !total) {
      $("race").replaceChildren();
      $("race-note").textContent = "This trace has no measurement of plain decoding to run beside.";
      return;
    }
    $("race-note").textContent = plain.same_text
      ? "Both columns write as fast as they were measured, on the same machine and the same prompt. They wrote the same text."
      : "Both columns write as fast as they were measured, on the same machine and the same prompt. Plain decoding wrote another text; its column shows this text at its speed.";
    const start = stats.prefill_ms;
    const lanes = [
      { name: "plain", times: output.map((_, index) => start + index * plain.ms_per_token) },
      { name: "ours", times: output.map((token) => start + (token.r < 0 ? 0 : sums[token.r + 1].ms)) },
    ];
    for (const lane of lanes) {
      lane.stream = $(`${lane.name}-stream`);
      lane.count = $(`${lane.name}-count`);
      lane.fill = document.querySelector(`.lane.${lane.name} .bar i`);
      lane.end = lane.times[lane.times.length - 1];
    }
    const end = Math.max(...lanes.map((lane) => lane.end));
    let clock = 0;
    let before = null;
    let frame = null;
    const seconds = (ms) => `${(ms / 1000).toFixed(2)} s`;

    function draw() {
      for (const lane of lanes) {
        let piece = "";
        while (lane.done < output.length && lane.times[lane.done] <= clock) piece += output[lane.done++].p;
        if (piece) {
          // One text node a paragraph, so that a long text is not laid out anew at each token.
          for (const line of piece.split(/(?<=\n)/)) {
            if (!lane.text || lane.text.data.endsWith("\n")) {
              lane.text = document.createTextNode("");
              lane.stream.append(el("div", { dir: "auto" }, lane.text));
            }
            lane.text.appendData(line);
          }
          lane.stream.scrollTop = lane.stream.scrollHeight;
        }
        const label = `${plural(lane.done, "token")}${lane.done === output.length ? ` in ${seconds(lane.end)}` : ""}`;
        if (lane.count.textContent !== label) lane.count.textContent = label;
        lane.fill.style.width = percent(lane.done, output.length);
      }
      $("race-clock").textContent = seconds(Math.min(clock, end));
    }

    function reset() {
      stop();
      clock = 0;
      for (const lane of lanes) {
        lane.done = 0;
        lane.text = null;
        lane.stream.replaceChildren();
      }
      $("race-end").textContent = "";
      $("race-play").textContent = "Start";
      draw();
    }

    function stop() {
      if (frame !== null) cancelAnimationFrame(frame);
      frame = null;
      before = null;
      $("race-play").textContent = clock >= end ? "Again" : "Go on";
    }

    function tick(time) {
      clock += before === null ? 0 : (time - before) * Number($("race-speed").value);
      before = time;
      draw();
      if (clock < end) {
        frame = requestAnimationFrame(tick);
        return;
      }
      stop();
      const [slow, fast] = lanes;
      $("race-end").textContent = `Speculative decoding took ${seconds(fast.end)}, plain decoding ${seconds(slow.end)}, ${seconds(start)} of each for the prompt.`;
    }

    $("race-play").addEventListener("click", () => {
      if (frame !== null) return stop();
      if (clock >= end) reset();
      $("race-play").textContent = "Pause";
      frame = requestAnimationFrame(tick);
    });
    $("race-reset").addEventListener("click", reset);
    reset();
  }

  // ---------------------------------------------------------------- head, legend, theme

  function buildHead() {
    const named = [
      ["target", data.target],
      ["head", data.head],
      ["drafter", data.drafter],
      ["number format", data.dtype],
      ["rule", data.rule],
      ["temperature", data.rule === "greedy" ? null : data.temperature],
    ];
    $("facts").append(...named.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => el("li", {}, el("span", {}, name), " ", el("bdi", { title: value }, String(value)))));
    const promise = $("promise");
    if (data.lossy) {
      promise.classList.add("lossy");
      promise.append(el("b", {}, "Lossy. "), "Typical acceptance keeps what the target finds plausible, more often than the target would write it. This text does not have the target’s distribution: the target alone writes other texts.");
    } else if (data.rule === "greedy") {
      promise.append(el("b", {}, "Greedy, nothing changes. "), "A draft stands only where it equals the target’s best token: this is the text that the target writes alone, but for ties that rounding decides.");
    } else {
      promise.append(el("b", {}, "Exact. "), "Whatever was drafted, the text has the target’s own distribution.");
    }
    const legend = $("legend");
    for (let depth = 1; depth <= depths; depth++) {
      legend.append(el("span", { class: `t ${colour(depth)}`, "data-d": depth }, depth === 1 ? "depth 1" : String(depth)));
    }
    legend.append(el("span", { class: "t own" }, "target’s own"));
  }

  function buildTheme() {
    const names = { system: "Theme: system", light: "Theme: light", dark: "Theme: dark" };
    const order = Object.keys(names);
    let chosen = "system";
    const show = () => {
      if (chosen === "system") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = chosen;
      $("theme").textContent = names[chosen];
    };
    $("theme").addEventListener("click", () => {
      chosen = order[(order.indexOf(chosen) + 1) % order.length];
      show();
    });
    show();
  }

  buildTheme();
  buildHead();
  buildText();
  buildCounts();
  buildPlayer();
  buildTree();
  buildTokens();
  buildRace();
  if (total) {
    go(0, { quiet: true });
  } else {
    showText(0);
    $("round-title").textContent = "No round";
    $("sentence").textContent = "The prefill gave the whole answer: there was nothing to draft.";
    $("where").textContent = "No rounds";
    for (const id of ["tree-frame", "tree-hint", "draws-title", "residual-part", "time-title", "best"]) $(id).hidden = true;
  }
})();
