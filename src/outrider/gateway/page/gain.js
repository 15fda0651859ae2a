// The gain of speculation in one sentence, from counts. A loss is stated as well.

const times = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

/** One run: round trips to the cloud, beside the steps that the cloud takes alone. "" without a sentence. */
export function gain(way, end, count) {
  const asked = end.stats.escalated;
  if (way !== "speculative" || !count || end.stats.cloud_lost || asked === undefined) return "";
  const text = end.guarantee === "exact" ? "The cloud's own text" : "A text that may differ from the cloud's";
  if (asked >= count) return `${text}, but the cloud was asked ${times(asked, "time")} for ${times(count, "token")}: no
  gain.`;
  return `${text} with ${times(asked, "round trip")} to the cloud; alone it takes ${times(count, "step")}, one for each token.`;
}

/** Compare text and speed with a run of the cloud alone. Both: {end, tokens}. same: equal tokens. */
export function gainBeside(together, cloud, same) {
  const [ours, theirs] = [together.tokens.list.length, cloud.tokens.list.length];
  const [stats, alone] = [together.end.stats, cloud.end.stats];
  if (stats.cloud_lost || alone.cloud_lost || !theirs || !(stats.total_s > 0)) return "";
  const text = same === ours && ours === theirs ? "Same text" : `${same} of ${times(theirs, "token")} as the cloud alone`;
  const trips = `${times(stats.escalated, "round trip")} instead of ${times(theirs, "step")} of the cloud`;
  const ratio = alone.total_s / stats.total_s;
  const speed = ratio >= 1.05 ? `${ratio.toFixed(1)} times as fast as the cloud alone`
    : ratio > 0.95 ? "as fast as the cloud alone"
    : `it took ${(1 / ratio).toFixed(1)} times as long as the cloud alone: it did not pay here`;
  return `${text}; ${trips}; ${speed}.`;
}
