"use strict";
// The particle player: rebuilds the states of a population and shows them step by step. All text is set as text.
(() => {
  const reduced = matchMedia("(prefers-reduced-motion: reduce)"), dark = matchMedia("(prefers-color-scheme: dark)");
  const make = (name, kind) => Object.assign(document.createElement(name), kind ? { className: kind } : {});

  // ---- the states, from differences between children and parents
  function unpacked(holder) {
    const known = JSON.parse(holder.dataset.states), { particles, length, start, parents, changes } = known;
    const here = Array.from({ length: particles }, (_, n) => n);
    const states = [Uint32Array.from(here.flatMap((n) => start[n % start.length]))];
    changes.forEach(([gaps, tokens], k) => {
      const next = new Uint32Array(particles * length);
      (parents[k] ?? here).forEach((parent, child) => {
        next.set(states[k].subarray(parent * length, (parent + 1) * length), child * length);
      });
      let place = 0;
      gaps.forEach((gap, i) => { place += gap; next[place] = tokens[i]; });
      states.push(next);
    });
    const parent = (step, n) => step ? parents[step - 1]?.[n] ?? n : n;
    const state = (step, n) => states[step].subarray(n * length, (n + 1) * length);
    return { ...known, steps: changes.length, parent, state };
  }

  // ---- the ancestors and descendants of a particle at every step, and the line to its heaviest last descendant
  function relatives({ steps, particles, weights, parent }, step, particle) {
    const kin = Array.from({ length: steps + 1 }, () => new Set()), line = [];
    kin[step].add(particle);
    for (let s = step, n = particle; s > 0; s--) kin[s - 1].add(n = parent(s, n));
    for (let s = step + 1; s <= steps; s++) {
      for (let n = 0; n < particles; n++) if (kin[s - 1].has(parent(s, n))) kin[s].add(n);
    }
    let last = step;
    while (last < steps && kin[last + 1].size) last++;
    let n = [...kin[last]].reduce((best, one) => weights[last][one] > weights[last][best] ? one : best);
    for (let s = last; s >= 0; s--) { line[s] = n; n = parent(s, n); }
    return { step, particle, kin, line };
  }

  // ---- how a state is drawn: pixels on a canvas, or tokens as text
  function painter({ kind, side, alphabet, pieces, mask, state }) {
    const masked = (token) => token === mask || kind === "letters" && token >= alphabet.length;
    const hidden = (tokens) => tokens.reduce((sum, token) => sum + masked(token), 0);
    if (kind === "image") {
      const shade = (name) => {
        const hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
        return [1, 3, 5].map((k) => parseInt(hex.slice(k, k + 2), 16));
      };
      const draw = () => Object.assign(make("canvas"), { width: side, height: side });
      const paint = (canvas, tokens) => {
        const colours = { ink: shade("--ink"), paper: shade("--paper"), mask: shade("--faint") };
        const image = new ImageData(side, side);
        tokens.forEach((token, k) => {
          image.data.set([...masked(token) ? colours.mask : token ? colours.ink : colours.paper, 255], 4 * k);
        });
        canvas.getContext("2d").putImageData(image, 0, 0);
      };
      return { draw, paint, hidden, words: () => "" };
    }
    const letters = kind === "letters", block = letters ? "▒" : " ▒▒";
    const piece = (token) => letters ? alphabet[token] : pieces?.[token] ?? ` ${token}`;
    const first = state(0, 0), given = hidden(first) ? [...first].map((token) => !masked(token)) : [];
    const look = (token, site, before) => masked(token) ? "mask"
      : (letters ? alphabet[token] : given[site] ? "given" : "") + (before && before[site] !== token ? " fresh" : "");
    const draw = () => make("code", letters ? "letters" : "tokens");
    const paint = (code, tokens, before) => {
      const runs = [];
      let kept = null;
      tokens.forEach((token, site) => {
        const kind = look(token, site, before);
        let text = masked(token) ? block : piece(token);
        if (kind !== kept) {
          if (runs.length && text.startsWith(" ")) { // the space is not underlined
            runs[runs.length - 1].textContent += " ";
            text = text.slice(1);
          }
          runs.push(make("i", kind));
        }
        runs[runs.length - 1].textContent += text;
        kept = kind;
      });
      code.replaceChildren(...runs);
    };
    const spoken = (tokens) => [...tokens].map((token) => masked(token) ? " _" : piece(token)).join("");
    return { draw, paint, hidden, words: letters ? () => "" : spoken };
  }

  for (const part of document.querySelectorAll(".player")) play(part);

  function play(part) {
    const find = (query) => part.querySelector(query);
    const row = find(".pick-row"), population = find(".pick-population"), slider = find("input");
    const button = find(".play"), unpin = find(".unpin"), said = find(".said"), marks = find(".marks");
    const tiles = find(".tiles"), line = find(".traced");
    let known, paint, nodes = [], step = 0, pinned = null, timer = null, lead = null;

    const load = () => {
      stop();
      const many = Number(row.selectedOptions[0].dataset.populations);
      const wanted = Math.min(Number(population.value), many - 1);
      population.replaceChildren(...Array.from({ length: many }, (_, k) => new Option(k + 1, k)));
      population.value = wanted;
      const holder = find(`.states[data-row="${Number(row.value)}"][data-population="${wanted}"]`);
      known = unpacked(holder);
      paint = painter(known);
      pinned = null;
      slider.max = known.steps;
      tiles.className = `tiles ${known.kind} ${holder.dataset.colour}`;
      line.className = `traced ${known.kind}`;
      lead = { drawing: paint.draw(), text: make("p") };
      lead.drawing.setAttribute("aria-hidden", "true");
      line.replaceChildren(lead.text, lead.drawing);
      nodes = Array.from({ length: known.particles }, (_, n) => tile(n));
      tiles.replaceChildren(...nodes.map((node) => node.button));
      marks.replaceChildren(...known.parents.flatMap((parents, k) => {
        if (!parents) return [];
        const mark = make("i");
        mark.style.left = `${100 * (k + 0.5) / known.steps}%`;
        return [mark];
      }));
      show(known.steps);
    };

    const tile = (n) => {
      const node = { button: make("button", "tile"), drawing: paint.draw(), bar: make("i"), weight: make("span") };
      node.label = make("span", "unseen"); // what is read aloud, in place of the rest
      const top = make("span", "top"), who = make("b"), track = make("span", "weight");
      node.button.type = "button";
      node.button.tabIndex = n ? -1 : 0;
      who.textContent = n;
      for (const seen of [node.drawing, top]) seen.setAttribute("aria-hidden", "true");
      track.append(node.bar);
      top.append(who, node.weight);
      node.button.append(node.label, top, node.drawing, track);
      node.button.addEventListener("click", () => pin(n));
      return node;
    };

    const show = (wanted) => {
      step = Math.min(known.steps, Math.max(0, wanted));
      const weights = known.weights[step], most = Math.max(...weights, 1e-9);
      let masked = 0;
      nodes.forEach((node, n) => {
        const tokens = known.state(step, n), hidden = paint.hidden(tokens), kin = pinned?.kin[step].has(n) ?? false;
        const own = pinned?.step === step && pinned.particle === n;
        masked += hidden;
        paint.paint(node.drawing, tokens, step ? known.state(step - 1, known.parent(step, n)) : null);
        node.bar.style.width = `${100 * weights[n] / most}%`;
        node.weight.textContent = weights[n].toFixed(3);
        node.button.classList.toggle("kin", kin);
        node.button.setAttribute("aria-pressed", own);
        const text = paint.words(tokens), label = [`Particle ${n}`, `weight ${weights[n].toFixed(3)}`];
        label.push(`${hidden} of ${known.length} sites masked`);
        if (own) label.push("pinned");
        else if (kin) label.push(`${step < pinned.step ? "ancestor" : "descendant"} of the pinned one`);
        node.label.textContent = label.join(", ") + (text ? `:${text}` : "");
      });
      tiles.classList.toggle("pinned", pinned !== null);
      unpin.disabled = pinned === null;
      follow();
      const total = weights.reduce((sum, w) => sum + w, 0), square = weights.reduce((sum, w) => sum + w * w, 0);
      const ess = square ? Math.min(known.particles, total * total / square) : 0; // 0 if the population has died
      const parents = step ? known.parents[step - 1] : null, at = `Step ${step} of ${known.steps}`;
      const about = [at, `ESS ${ess.toFixed(1)} of ${known.particles}`];
      about.push(`${masked} of ${known.particles * known.length} sites masked`);
      if (parents) about.push(`resampled before it: ${new Set(parents).size} of ${known.particles} have children`);
      slider.value = step;
      slider.setAttribute("aria-valuetext", parents ? `${at}, resampled before it` : at);
      said.textContent = about.join(" · ");
    };

    // the pinned particle, larger, at the step that is shown; the heaviest one if none is pinned
    const follow = () => {
      let at = step, n = pinned?.line[step];
      if (pinned) {
        const kin = pinned.kin[step].size;
        const later = kin > 1 ? `${kin} descendants here, shown is ${n}` : `1 descendant here, ${n}`;
        const here = step < pinned.step ? `its ancestor here is ${n}` : step === pinned.step ? "this step"
          : kin ? later : "died out, its last state";
        if (n === undefined) { at = pinned.line.length - 1; n = pinned.line[at]; }
        lead.text.textContent = `Pinned: particle ${pinned.particle} of step ${pinned.step} · ${here}`;
      } else {
        n = known.weights[step].indexOf(Math.max(...known.weights[step]));
        lead.text.textContent = `Heaviest: particle ${n}`;
      }
      paint.paint(lead.drawing, known.state(at, n), at ? known.state(at - 1, known.parent(at, n)) : null);
    };

    const pin = (n) => {
      pinned = pinned?.step === step && pinned.particle === n ? null : relatives(known, step, n);
      reach(n);
      show(step);
    };
    const release = () => { pinned = null; show(step); };
    const reach = (n) => nodes.forEach((node, k) => { node.button.tabIndex = k === n ? 0 : -1; });

    const stop = () => {
      clearTimeout(timer);
      timer = null;
      button.textContent = "Play";
      said.setAttribute("aria-live", "polite");
    };
    const go = () => {
      if (timer !== null) return stop();
      button.textContent = "Pause";
      said.setAttribute("aria-live", "off"); // a step at a time is read out, not a film
      if (step === known.steps) show(0);
      const by = reduced.matches ? Math.ceil(known.steps / 10) : 1; // ten stills in place of a film
      const pause = reduced.matches ? 1000 : Math.min(600, Math.max(80, 12000 / known.steps));
      const tick = () => {
        show(step + by);
        if (step === known.steps) stop(); else timer = setTimeout(tick, pause);
      };
      timer = setTimeout(tick, pause);
    };

    for (const pick of [row, population]) pick.addEventListener("change", load);
    slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
    button.addEventListener("click", go);
    unpin.addEventListener("click", () => { release(); slider.focus(); });
    part.addEventListener("keydown", (event) => { if (event.key === "Escape" && pinned) release(); });
    tiles.addEventListener("keydown", (event) => {
      const turn = { ArrowLeft: -1, ArrowRight: 1 }[event.key], move = { ArrowUp: -1, ArrowDown: 1 }[event.key];
      if (!turn && !move) return;
      event.preventDefault();
      if (turn) { stop(); show(step + turn); return; }
      const at = nodes.findIndex((node) => node.button === document.activeElement);
      const next = Math.min(nodes.length - 1, Math.max(0, at + move));
      reach(next);
      nodes[next].button.focus();
    });
    dark.addEventListener("change", () => show(step));
    load();
  }
})();
