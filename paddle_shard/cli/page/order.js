// Which sample is at a position of a plan? What `paddle_shard.plan` computes with numpy, for a page without a server.
//
// The rules are described there: shuffle.py, blocks.py, orders.py (Paddle's), weights.py and mixture.py. Positions and
// samples are at most 2^52: numbers are exact up to 2^53, and so are sums of two. tests/cli/test_order.py compares each
// order with Python's.
"use strict";

function makePlan(view, blake2b) {
  const TABLE_MAX = 4096;
  const ROUNDS = 6;
  const CACHED = 256; // permutations that are kept: windows of blocks, epochs of sources
  const ceilDiv = (a, b) => Math.floor((a - 1) / b) + 1;
  const sum = (values) => values.reduce((a, b) => a + b, 0);
  const zeros = (count) => new Array(count).fill(0);

  /** Returns a function whose newest results are kept; arguments are compared as text. */
  function kept(most, make) {
    const found = new Map();
    return (...key) => {
      const name = String(key);
      if (!found.has(name)) {
        if (found.size >= most) found.delete(found.keys().next().value);
        found.set(name, make(...key));
      }
      return found.get(name);
    };
  }

  /** The number of entries of an ascending array that are at most `value`. */
  function countUpTo(ascending, value) {
    let low = 0;
    for (let high = ascending.length; low < high;) {
      const middle = (low + high) >> 1;
      if (ascending[middle] <= value) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // shuffle.py

  /** The key of a Python tuple, given as text (`seeding.derive_key`): eight words, the low half of each first. */
  function wordsOf(text) {
    const bytes = blake2b(new TextEncoder().encode(text), { dkLen: 64 });
    return new Uint32Array(bytes.slice().buffer); // as little-endian as the machines that have browsers
  }

  // The 64-bit hash of `hash_into`, in halves of 32 bits: twenty times as fast as with BigInt.
  let high = 0;
  let low = 0;

  /** Multiplies (high, low) by another number of 64 bits. */
  function multiply(otherHigh, otherLow) {
    const upper = low >>> 16;
    const lower = low & 0xffff;
    const middle = upper * (otherLow & 0xffff) + ((lower * (otherLow & 0xffff)) >>> 16);
    const carried = lower * (otherLow >>> 16) + (middle % 65536);
    const top = upper * (otherLow >>> 16) + Math.floor(middle / 65536) + Math.floor(carried / 65536);
    high = (top + Math.imul(high, otherLow) + Math.imul(low, otherHigh)) >>> 0;
    low = Math.imul(low, otherLow) >>> 0;
  }

  /** Replaces (high, low) by its hash under the word of a round. */
  function hash(words, round) {
    high = (high ^ words[2 * round + 1]) >>> 0;
    low = (low ^ words[2 * round]) >>> 0;
    multiply(0x9e3779b9, 0x7f4a7c15);
    low = (low ^ high) >>> 0;
    multiply(0xd6e8feb8, 0x6659fd93);
  }

  /** A permutation of the numbers below n, forwards and backwards, given the text of its key. */
  const permutation = kept(CACHED, (n, key) => {
    const words = wordsOf(key);
    if (n <= TABLE_MAX) {
      const [highs, lows] = [new Uint32Array(n), new Uint32Array(n)];
      for (let i = 0; i < n; i++) {
        high = 0;
        low = i;
        for (let round = 0; round < 3; round++) hash(words, round);
        highs[i] = high;
        lows[i] = low;
      }
      const table = Uint16Array.from(highs.keys()).sort((i, j) => highs[i] - highs[j] || lows[i] - lows[j]);
      return { at: (place) => table[place], inverse: (sample) => table.indexOf(sample) };
    }
    let a = Math.floor(Math.sqrt(n - 1)) + 1; // sqrt may be off by one
    while (a * a < n) a++;
    while ((a - 1) * (a - 1) >= n) a--;
    const b = ceilDiv(n, a);
    function network(value, backward) {
      do {
        const halves = [Math.floor(value / b), value % b];
        for (let number = 0; number < ROUNDS; number++) {
          const round = backward ? ROUNDS - 1 - number : number;
          const half = round % 2;
          const size = half ? b : a;
          high = 0;
          low = halves[1 - half];
          hash(words, round);
          // (high * size) >> 32, in two parts that are below 2^53
          const added = Math.floor(((high >>> 16) * size + Math.floor(((high & 0xffff) * size) / 65536)) / 65536);
          halves[half] = (halves[half] + (backward ? size - added : added)) % size;
        }
        value = halves[0] * b + halves[1];
      } while (value >= n);
      return value;
    }
    return { at: (place) => network(place, false), inverse: (sample) => network(sample, true) };
  });

  // orders.py

  /** numpy's `RandomState(seed).shuffle(arange(length))`: MT19937, and numbers below a bound by rejection. */
  function numpyShuffled(length, seed) {
    const state = new Uint32Array(624);
    state[0] = seed;
    for (let i = 1; i < 624; i++) state[i] = Math.imul(1812433253, state[i - 1] ^ (state[i - 1] >>> 30)) + i;
    let at = 624;
    function next() {
      if (at === 624) {
        for (at = 0; at < 624; at++) {
          const y = (state[at] & 0x80000000) | (state[(at + 1) % 624] & 0x7fffffff);
          state[at] = state[(at + 397) % 624] ^ (y >>> 1) ^ (y & 1 ? 0x9908b0df : 0);
        }
        at = 0;
      }
      let y = state[at++];
      y ^= y >>> 11;
      y ^= (y << 7) & 0x9d2c5680;
      y ^= (y << 15) & 0xefc60000;
      return (y ^ (y >>> 18)) >>> 0;
    }
    const table = Uint32Array.from({ length }, (_, i) => i);
    for (let i = length - 1; i > 0; i--) {
      const mask = 0xffffffff >>> Math.clz32(i);
      let j;
      do j = (next() & mask) >>> 0;
      while (j > i);
      const swapped = table[i];
      table[i] = table[j];
      table[j] = swapped;
    }
    return table;
  }

  // blocks.py

  function blockOrder(length, { block_size: size, window: perWindow }, { width, parts }, epoch) {
    const share = width / parts;
    const rows = Math.floor(length / width);
    const [whole, inRows, rest] = [rows * width, rows * share, length % width];
    const rests = [...Array(parts + 1).keys()].map((part) => Math.floor((part * rest) / parts));
    const starts = rests.map((begin, part) => part * inRows + begin);
    size = Math.min(size, length);
    const numBlocks = ceilDiv(length, size);
    perWindow = Math.min(perWindow, numBlocks);
    const gap = numBlocks * size - length;
    const blocks = permutation(numBlocks, `('blocks', ${view.seed}, ${epoch})`);
    const short = blocks.inverse(numBlocks - 1);
    const shortEnd = (short + 1) * size - gap;
    const startOf = (slot) => slot * size - (slot > short ? gap : 0);
    const slotOf = (place) => Math.floor((place + (place >= shortEnd ? gap : 0)) / size);
    return (position) => {
      const [row, column] = [Math.floor(position / width), position % width];
      let part = Math.floor(column / share);
      let place = row * share + (column % share);
      if (position >= whole) {
        part = countUpTo(rests, position - whole) - 1;
        place = inRows + position - whole - rests[part];
      }
      place += starts[part];
      const window = Math.floor(slotOf(place) / perWindow);
      const first = Math.max(startOf(window * perWindow), starts[part]);
      const end = Math.min(startOf(Math.min((window + 1) * perWindow, numBlocks)), starts[part + 1]);
      const mixing = permutation(end - first, `('window', ${view.seed}, ${epoch}, ${part}, ${window})`);
      const mixed = first + mixing.at(place - first);
      const slot = slotOf(mixed);
      return blocks.at(slot) * size + (mixed - startOf(slot));
    };
  }

  // weights.py

  /** The sequence of sources for integer weights: `Chairman`. It is computed whole: at most 2^20 entries. */
  function chairman(weights) {
    const divisor = weights.reduce(function gcd(a, b) {
      return b ? gcd(b, a % b) : a;
    });
    const parts = weights.map((weight) => weight / divisor);
    const period = sum(parts);
    const scale = Math.max(1, 2 * parts.filter((part) => part > 0).length - 2);
    // The draws by the position from which on each may be made, in a list a position: next draw, and its key. The key
    // is the deadline, and then the source.
    const released = new Int32Array(period).fill(-1);
    const next = new Int32Array(period);
    const keys = new Float64Array(period);
    let count = 0;
    parts.forEach((part, source) => {
      for (let draw = 0; draw < part; draw++, count++) {
        const first = ceilDiv((draw * scale + 1) * period, part * scale) - 1;
        keys[count] = Math.floor((((draw + 1) * scale - 1) * period) / (part * scale)) * parts.length + source;
        next[count] = released[first];
        released[first] = count;
      }
    });
    const heap = new Float64Array(period + 1); // heap[1] is the least, and those of i are 2i and 2i + 1
    let waiting = 0;
    function push(key) {
      let at = ++waiting;
      for (; at > 1 && heap[at >> 1] > key; at >>= 1) heap[at] = heap[at >> 1];
      heap[at] = key;
    }
    function pop() {
      const [least, key] = [heap[1], heap[waiting--]];
      let at = 1;
      for (let child = 2; child <= waiting; at = child, child = 2 * at) {
        if (child < waiting && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= key) break;
        heap[at] = heap[child];
      }
      heap[at] = key;
      return least;
    }
    const [sources, draws, drawn] = [new Uint16Array(period), new Int32Array(period), zeros(parts.length)];
    const every = Math.ceil(period / 256);
    const before = []; // what was drawn before every so many positions
    for (let position = 0; position < period; position++) {
      if (position % every === 0) before.push(drawn.slice());
      for (let draw = released[position]; draw >= 0; draw = next[draw]) push(keys[draw]);
      sources[position] = pop() % parts.length;
      draws[position] = drawn[sources[position]]++;
    }
    return {
      parts,
      period,
      /** How far from its share a source can be. */
      bound: 1 - 1 / scale,
      /** [source, how often it was drawn before] at a position. */
      at(position) {
        const source = sources[position % period];
        return [source, Math.floor(position / period) * parts[source] + draws[position % period]];
      },
      /** How often each source is drawn before a position. */
      counts(position) {
        const place = position % period;
        const near = Math.floor(place / every);
        const found = parts.map((part, source) => part * Math.floor(position / period) + before[near][source]);
        for (let at = near * every; at < place; at++) found[sources[at]]++;
        return found;
      },
    };
  }

  // mixture.py

  /** Which source is drawn at a position of the run, and in which epoch of it: `Draws`. */
  function drawsOf({ segments }) {
    const firsts = segments.map((segment) => segment.from);
    const chairmen = kept(segments.length, (number) => chairman(segments[number].weights));
    const base = kept(segments.length, (number) => {
      if (number === 0) return zeros(segments[0].weights.length);
      const counts = chairmen(number - 1).counts(firsts[number] - firsts[number - 1]);
      return base(number - 1).map((before, source) => before + counts[source]);
    });
    // Of each source: [first draw, its epoch, length of the epochs from there on], the newest last.
    const layers = segments[0].lengths.map((length) => [[0, 0, length]]);
    segments.slice(1).forEach((segment, at) =>
      segment.lengths.forEach((length, source) => {
        const [start, epoch, before] = layers[source].at(-1);
        if (!length || length === before) return;
        const begun = before > 0 ? Math.ceil((base(at + 1)[source] - start) / before) : 0;
        layers[source].push([start + begun * before, epoch + begun, length]);
      }),
    );
    const segmentAt = (position) => countUpTo(firsts, position) - 1;
    return {
      segmentAt,
      at(position) {
        const number = segmentAt(position);
        const [source, draws] = chairmen(number).at(position - firsts[number]);
        return [source, draws + base(number)[source]];
      },
      counts(position) {
        const number = segmentAt(position);
        const found = chairmen(number).counts(position - firsts[number]);
        return found.map((drawn, source) => drawn + base(number)[source]);
      },
      /** What was drawn of each source before a position, less its share, and the bound of that: segments add up. */
      drift(position) {
        const drift = this.counts(position);
        const newest = segmentAt(Math.max(0, position - 1));
        let bound = 0;
        for (let number = 0; number <= newest; number++) {
          const { parts, period, bound: one } = chairmen(number);
          const length = (number < newest ? firsts[number + 1] : position) - firsts[number];
          parts.forEach((part, source) => (drift[source] -= (length * part) / period));
          if (length % period || number === newest) bound += one;
        }
        return { drift, bound };
      },
      /** [epoch of the source, its length, the place in it] of a draw. */
      epoch(source, draw) {
        const [start, epoch, length] = layers[source].findLast((layer) => draw >= layer[0]);
        return [epoch + Math.floor((draw - start) / length), length, (draw - start) % length];
      },
    };
  }

  // The epochs

  const { order } = view;
  const draws = order.kind === "mixture" ? drawsOf(order) : null;
  const unknown = { samples: 0, positions: 0, served: 0, steps: 0, lastRows: 0, segments: [[0, view.batchSize]] };
  const epochOf = (epoch) => view.epochs[epoch] ?? view.epochs.any ?? unknown; // of a stream, nobody knows its steps

  /** The position of the run at which an epoch of a mixture begins: `first_sample`. */
  function firstOfRun(epoch) {
    if (!order.lengths.length) return epoch * view.epochs.any.positions;
    const ends = [...order.lengths.slice(1).map(([first]) => first), epoch];
    return sum(order.lengths.map(([first, samples], at) => Math.max(0, Math.min(ends[at], epoch) - first) * samples));
  }

  /** Returns the function that tells the sample at a position; of a mixture, [source, index]. */
  const orderOf = kept(4, (epoch) => {
    const { positions } = epochOf(epoch);
    if (order.kind === "sequential") return (position) => position;
    if (order.kind === "shuffled") return permutation(positions, `('order', ${view.seed}, ${epoch})`).at;
    if (order.kind === "blocks") return blockOrder(positions, order, epochOf(epoch), epoch);
    if (order.kind === "paddle") {
      const table = numpyShuffled(positions, epoch);
      return (position) => table[position];
    }
    const first = firstOfRun(epoch);
    return (position) => {
      const [source, draw] = draws.at(first + position);
      const [round, length, place] = draws.epoch(source, draw);
      if (!order.shuffled) return [source, place];
      return [source, permutation(length, `('source', ${order.keys[source]}, ${view.seed}, ${round})`).at(place)];
    };
  });

  const planned = { mesh: view.mesh, accumulation: view.accumulation, dealt: view.dealt };
  const delivered = view.stretches
    .filter((one) => "mesh" in one && one.counts !== false)
    .map((one) => ({ ...one, mesh: view.meshes[one.mesh] }));

  /** Who has read a position, as far as it is known, or else would. */
  const readerOf = (epoch, position) =>
    delivered.findLast((one) => one.epoch === epoch && one.first <= position && position < one.end) ?? planned;

  /** First position, rows, rows of a micro-batch, and who reads it, at a step: `ShardPlan._extent` and `Stretches`. */
  function extent(epoch, step) {
    const { segments, steps, lastRows } = epochOf(epoch);
    let begin = 0; // the step at which the segment begins
    let at = 0;
    for (; at + 1 < segments.length; at++) {
      const upto = begin + Math.ceil((segments[at + 1][0] - segments[at][0]) / segments[at][1]);
      if (upto > step) break;
      begin = upto;
    }
    const [first, size] = segments[at];
    const rows = step === steps - 1 ? lastRows : size;
    const whole = order.padsFirst ? view.batchSize : rows;
    const position = first + (step - begin) * size;
    const reader = readerOf(epoch, position);
    return { first: position, rows, microSize: Math.max(1, Math.floor(whole / reader.accumulation)), reader };
  }

  /** Whether it is known who has which row: nobody knows it if rows are dealt by cost, or another mesh has read them. */
  const isShared = ({ rows, microSize, reader: { mesh, dealt } }) =>
    !dealt && rows % mesh.count === 0 && microSize % mesh.count === 0;

  /** [data rank, row in its slice] of a row of a global batch: `partition.place_of_rows`; nulls if it is not shared. */
  function placeOfRow(row, batch) {
    if (!isShared(batch)) return [null, null];
    const { rows, microSize } = batch;
    const { count } = batch.reader.mesh;
    const [micro, within] = [Math.floor(row / microSize), row % microSize];
    const part = Math.floor(Math.min(microSize, rows - micro * microSize) / count);
    return [Math.floor(within / part), micro * Math.floor(microSize / count) + (within % part)];
  }

  /** The step that holds a position. */
  function stepOf(epoch, position) {
    let low = 0;
    for (let high = epochOf(epoch).steps; low < high;) {
      const middle = Math.floor((low + high) / 2);
      if (extent(epoch, middle).first <= position) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  const leftOut = new Map(view.skips.samples.map(([sample, ...since]) => [String(sample), since]));

  /** Whether the user leaves out what is at a position: `Skips.rows`. */
  function isLeftOut(epoch, position, sample) {
    if (view.skips.stretches.some(([of, first, end]) => of === epoch && first <= position && position < end))
      return true;
    const since = leftOut.get(String(sample));
    return since !== undefined && (since[0] < epoch || (since[0] === epoch && since[1] <= position));
  }

  /** Whether a row is real, padding or left out, given its sample; which sample matters only to some. */
  function stateOf(epoch, position, sample) {
    const { positions, samples } = epochOf(epoch);
    if (position >= positions || (order.padsFirst && sample >= samples)) return "padding";
    return isLeftOut(epoch, position, order.padsFirst ? sample % samples : sample) ? "left out" : "real";
  }

  /** A row of the global batch at a step: which sample, on which data rank, and whether it is real. */
  function rowAt(epoch, step, row, batch = extent(epoch, step)) {
    const { positions, samples } = epochOf(epoch);
    const position = batch.first + row;
    let served = position;
    if (position >= positions) {
      let from = 0; // `padding_from`: a source from before may be gone
      if (draws) {
        const first = firstOfRun(epoch);
        from = Math.max(0, order.segments[draws.segmentAt(first + positions - 1)].from - first);
      }
      served = from + ((position - positions) % (positions - from));
    }
    const sample = orderOf(epoch)(served);
    const [dataRank, local] = placeOfRow(row, batch);
    return {
      row,
      position,
      sample: order.padsFirst ? sample % samples : sample,
      dataRank,
      local,
      state: stateOf(epoch, position, sample),
    };
  }

  /** How many rows of each data rank are real, padding and left out at a step; of all in one if it is not shared. */
  function loads(epoch, step) {
    const batch = extent(epoch, step);
    const asks = order.padsFirst || leftOut.size > 0;
    const found = Array.from({ length: isShared(batch) ? batch.reader.mesh.count : 1 }, () => ({
      real: 0,
      padding: 0,
      "left out": 0,
    }));
    for (let row = 0; row < batch.rows; row++) {
      const state = asks ? rowAt(epoch, step, row, batch).state : stateOf(epoch, batch.first + row, null);
      found[placeOfRow(row, batch)[0] ?? 0][state]++;
    }
    return found;
  }

  return { epochOf, extent, isShared, rowAt, loads, stepOf, draws, firstOfRun };
}
