//! Price of a byte on the wire, in nanoseconds of encoding.

/// Controller that finds the price at which encoding takes as long as sending. The price rises while the picked
/// batches take the link longer than the encoders, and falls in the opposite case, so both stay busy, whichever is
/// the bottleneck. If no single method keeps both busy, two methods alternate evenly in the right proportion.
///
/// The controller uses the time that batches take on both, and not how full a queue is: one unencoded batch may fill
/// the queue for as long as hundreds of short ones take to encode.
#[derive(Clone, Copy, Debug)]
pub(super) struct Price {
    encoders: f32,
    /// Nanoseconds of the link for a byte.
    link_ns: f32,
    /// Bytes on which the link's speed is based, up to [`LINK_AVERAGE_BYTES`].
    link_bytes: f32,
    /// Natural logarithm of the price.
    log_price: f32,
    /// Nanoseconds that the slower of link and encoders takes for a batch, averaged over `batches` batches.
    batch_ns: f32,
    batches: f32,
    /// Other work of encoders in nanoseconds: since the last batch, and on average for each batch.
    other_work_ns: f32,
    other_work_per_batch_ns: f32,
    /// Time by which batches that no price would change kept the link busy longer than the encoders; negative in the
    /// opposite case. The queue between them holds this much.
    link_backlog_ns: f32,
}

/// Load of a batch, if it is sent in the picked way.
pub(super) struct Load {
    pub(super) bytes: f32,
    pub(super) ns: f32,
    /// True if some method leaves fewer bytes: a higher price would change the pick.
    pub(super) has_shorter_alternative: bool,
    /// True if it is not sent unencoded: a lower price would change the pick.
    pub(super) has_faster_alternative: bool,
}

/// Bounds of the price: the cost of a write, which no link avoids; and that of a link of 1 MB/s with one encoder.
const PRICE_BOUNDS_NS: (f32, f32) = (0.15, 1000.0);
/// Number of batches that the average of other work covers.
const OTHER_WORK_BATCHES: f32 = 64.0;
/// Bounds of the link's nanoseconds for a byte: from 1 TB/s to 1 KB/s.
const LINK_BOUNDS_NS: (f32, f32) = (1e-3, 1e6);
/// Smallest number of encoders: a thousandth of a CPU.
const ENCODERS_MIN: f32 = 1e-3;
/// Number of batches in which the price triples, if either side is idle all the time.
const ADJUSTMENT_BATCHES: f32 = 64.0;
/// Number of batches that the average load covers. It is large, because a rare batch that takes long must count
/// fully.
const AVERAGE_BATCHES_MAX: f32 = 1024.0;
/// Assumed capacity of the queue, in average batches that are encoded and not sent.
const QUEUE_BATCHES: f32 = 24.0;
/// Largest change of the logarithm by a single batch.
const STEP_MAX: f32 = 4.0;
/// Number of sent bytes that the average of the link's speed effectively covers.
const LINK_AVERAGE_BYTES: f32 = 8e6;
/// Weight of the initially known speed, in sent bytes.
const LINK_INITIAL_BYTES: f32 = 64e3;

impl Price {
    /// Creates a controller whose price is the time that a byte takes on the link.
    pub(super) fn from_link(bytes_per_second: u64, encoders: usize) -> Self {
        let encoders = (encoders as f32).max(1.0);
        let link_ns = (1e9 / bytes_per_second.max(1) as f32).clamp(LINK_BOUNDS_NS.0, LINK_BOUNDS_NS.1);
        Self {
            encoders,
            link_ns,
            link_bytes: LINK_INITIAL_BYTES,
            log_price: clamp_log_price((encoders * link_ns).ln()),
            batch_ns: 0.0,
            batches: 0.0,
            other_work_ns: 0.0,
            other_work_per_batch_ns: 0.0,
            link_backlog_ns: 0.0,
        }
    }

    /// Sets the number of concurrent encoders from now on; the controller adapts the price.
    pub(super) fn set_encoders(&mut self, encoders: f32) {
        self.encoders = if encoders > ENCODERS_MIN { encoders } else { ENCODERS_MIN };
    }

    /// Records other work of an encoder.
    pub(super) fn record_other_work(&mut self, ns: u64) {
        self.other_work_ns += ns as f32;
    }

    /// Returns the price, in nanoseconds of an encoder.
    pub(super) fn ns_per_byte(self) -> f32 {
        self.log_price.exp()
    }

    /// Returns the nanoseconds of the link for a byte.
    pub(super) fn link_ns_per_byte(self) -> f32 {
        self.link_ns
    }

    /// Records that the link took `ns` nanoseconds for `bytes` bytes.
    pub(super) fn record_sent(&mut self, bytes: u64, ns: u64) {
        let bytes = (bytes as f32).max(1.0);
        let share = bytes / (bytes + self.link_bytes);
        self.link_bytes = (self.link_bytes + bytes).min(LINK_AVERAGE_BYTES);
        let (previous_ns, is_known) = (self.link_ns, self.link_bytes == LINK_AVERAGE_BYTES);
        self.link_ns =
            (previous_ns + (ns as f32 / bytes - previous_ns) * share).clamp(LINK_BOUNDS_NS.0, LINK_BOUNDS_NS.1);
        // As long as the price is based mainly on the configured speed of the link, the measured speed is better.
        // Later the controller finds the right price, and a socket that accepts bytes faster than the link must not
        // disturb it.
        if !is_known {
            self.log_price = clamp_log_price(self.log_price + (self.link_ns / previous_ns).ln());
        }
    }

    /// Records a batch that is going to be sent.
    pub(super) fn record_pick(&mut self, load: &Load) {
        let other_work_ns = std::mem::take(&mut self.other_work_ns);
        self.other_work_per_batch_ns += (other_work_ns - self.other_work_per_batch_ns) / OTHER_WORK_BATCHES;
        let encoder_ns = (load.ns + self.other_work_per_batch_ns) / self.encoders;
        let link_ns = load.bytes * self.link_ns;
        let slower_ns = link_ns.max(encoder_ns).max(1.0);
        self.batches = (self.batches + 1.0).min(AVERAGE_BATCHES_MAX);
        self.batch_ns += (slower_ns - self.batch_ns) / self.batches;

        let excess_ns = link_ns - encoder_ns;
        let price_matters = if excess_ns > 0.0 { load.has_shorter_alternative } else { load.has_faster_alternative };
        if price_matters {
            let step = self.remaining_excess(excess_ns) / (ADJUSTMENT_BATCHES * self.batch_ns);
            self.log_price = clamp_log_price(self.log_price + step.clamp(-STEP_MAX, STEP_MAX));
        } else {
            // Beyond the capacity of the queue one side waits, and nothing is gained from that later. Without this
            // bound, data that neither compresses nor waits would drive the price beyond all limits.
            let ahead_max = QUEUE_BATCHES * self.batch_ns;
            self.link_backlog_ns = (self.link_backlog_ns + excess_ns).clamp(-ahead_max, ahead_max);
        }
    }

    /// Returns the part of an excess that remains after it has cancelled an earlier one of the opposite sign.
    fn remaining_excess(&mut self, excess_ns: f32) -> f32 {
        if self.link_backlog_ns * excess_ns >= 0.0 {
            return excess_ns;
        }
        let sum = self.link_backlog_ns + excess_ns;
        let is_earlier_cancelled = sum * excess_ns > 0.0;
        self.link_backlog_ns = if is_earlier_cancelled { 0.0 } else { sum };
        if is_earlier_cancelled { sum } else { 0.0 }
    }
}

fn clamp_log_price(log: f32) -> f32 {
    log.clamp(PRICE_BOUNDS_NS.0.ln(), PRICE_BOUNDS_NS.1.ln())
}
