// Recordings: decoded in the browser to 16 kHz mono, sent as WAV, played without a media element.

const RATE = 16000;

/** Any recording that the browser can read, as {samples: Float32Array at 16 kHz mono, seconds}. */
export async function decode(bytes) {
  const context = new OfflineAudioContext(1, 1, RATE); // decoding resamples to its rate
  let buffer;
  try {
    buffer = await context.decodeAudioData(bytes);
  } catch (problem) {
    throw new Error(`The browser cannot read this recording (${problem.message}).`);
  }
  return { samples: mono(buffer), seconds: buffer.duration };
}

function mono(buffer) {
  const channels = Array.from({ length: buffer.numberOfChannels }, (_, n) => buffer.getChannelData(n));
  if (channels.length === 1) return channels[0];
  return Float32Array.from(channels[0], (_, n) => channels.reduce((sum, one) => sum + one[n], 0) / channels.length);
}

/** 16-bit WAV of samples in −1 to 1. */
export function wav(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const word = (at, text) => [...text].forEach((letter, n) => view.setUint8(at + n, letter.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // one channel
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  word(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, n) => {
    view.setInt16(44 + 2 * n, Math.max(-32768, Math.min(32767, Math.round(value * 32768))), true);
  });
  return view.buffer;
}

export function base64(bytes) {
  const all = new Uint8Array(bytes);
  let text = "";
  for (let n = 0; n < all.length; n += 0x8000) text += String.fromCharCode(...all.subarray(n, n + 0x8000));
  return btoa(text);
}

let player = null;
let playing = null;

/** Play encoded bytes, and stop what played before. ended: called once, however it ends. */
export async function play(bytes, ended) {
  silence();
  player = player || new AudioContext();
  await player.resume();
  const source = player.createBufferSource();
  source.buffer = await player.decodeAudioData(bytes.slice(0));
  source.connect(player.destination);
  source.onended = () => {
    if (playing === source) playing = null;
    ended();
  };
  playing = source;
  source.start();
}

export function silence() {
  if (playing) playing.stop();
  playing = null;
}

/** Why the microphone cannot be used here; empty where it can. */
export function noMicrophone() {
  if (!window.isSecureContext) return "Recording needs https, or this machine's own address.";
  if (!navigator.mediaDevices || !window.MediaRecorder) return "This browser cannot record.";
  return "";
}

/** Record until stop() is called, which gives the encoded bytes. */
export async function record() {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const parts = [];
  recorder.ondataavailable = (event) => parts.push(event.data);
  const done = new Promise((resolve) => { recorder.onstop = () => resolve(new Blob(parts).arrayBuffer()); });
  recorder.start();
  return {
    stop() {
      recorder.stop();
      stream.getTracks().forEach((track) => track.stop());
      return done;
    },
  };
}
