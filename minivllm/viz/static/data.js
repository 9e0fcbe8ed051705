// What a view shows: a JSON header, and binary parts that are inflated when they are asked for.

export function fromBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text.trim());
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Little-endian base-128 numbers, zigzag-coded (0, -1, 1, -2, ...), as `payload.varints` writes them.
export function readVarints(bytes, count) {
  const numbers = new Int32Array(count);
  let at = 0;
  for (let i = 0; i < count; i++) {
    let value = 0;
    let shift = 0;
    let byte;
    do {
      byte = bytes[at++];
      value |= (byte & 127) << shift;
      shift += 7;
    } while (byte & 128);
    numbers[i] = (value >>> 1) ^ -(value & 1);
  }
  return numbers;
}

// The header of a view with its parts. `header.blobs` says where each lies: [offset, length, count of numbers or -1].
export class Data {
  constructor(header, bytes, keep = 12) {
    this.header = header;
    this.bytes = bytes;
    this.keep = keep;
    this.recent = new Map(); // part -> promise of its value, the least recently used first
  }

  // A promise of part `i`: an Int32Array where Python packed numbers, else a Uint8Array.
  part(i) {
    let value = this.recent.get(i);
    if (value === undefined) {
      value = this.read(i);
      if (this.recent.size >= this.keep) this.recent.delete(this.recent.keys().next().value);
    } else {
      this.recent.delete(i);
    }
    this.recent.set(i, value);
    return value;
  }

  async read(i) {
    const [offset, length, count] = this.header.blobs[i];
    const bytes = await inflate(this.bytes.subarray(offset, offset + length));
    return count < 0 ? bytes : readVarints(bytes, count);
  }

  async json(i) {
    return JSON.parse(new TextDecoder().decode(await this.part(i)));
  }
}
