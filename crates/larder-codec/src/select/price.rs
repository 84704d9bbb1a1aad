//! What a byte on the wire is worth.

/// Finds the price at which encoding takes as long as sending: higher while what is picked takes the link longer than the
/// encoders, lower while it is the other way round. So both are kept busy, whichever is the bottleneck; and where no
/// method would keep both busy, two of them take turns, in the right proportion and evenly.
///
/// What counts is how long batches take both, and not how full a queue is: one batch as it is may fill the queue for as
/// long as hundreds of short ones take to encode.
#[derive(Clone, Copy, Debug)]
pub(super) struct Price {
    encoders: f32,
    /// Of the link, for a byte.
    link_ns: f32,
    /// By which this is known, up to [`LINK_BYTES`].
    link_bytes: f32,
    /// Natural logarithm of nanoseconds of an encoder for a byte.
    log: f32,
    /// What a batch takes the slower of both, as an average over so many.
    batch_ns: f32,
    batches: f32,
    /// What encoders do besides, in nanoseconds: since the last batch, and for each as an average.
    besides_ns: f32,
    besides_of_batch_ns: f32,
    /// By how much batches to which the price makes no difference kept the link busy longer than the encoders; negative the
    /// other way round. The queue between them holds this much.
    ahead_ns: f32,
}

/// What a batch would take, if it is sent in the way that was picked.
pub(super) struct Load {
    pub(super) bytes: f32,
    pub(super) ns: f32,
    /// Some method leaves fewer bytes: a higher price would change something.
    pub(super) could_be_shorter: bool,
    /// It is not sent as it is: a lower price would change something.
    pub(super) could_be_sooner: bool,
}

/// What it takes to write it, however fast the link is; and a link of 1 MB/s with one encoder.
const NS_PER_BYTE: (f32, f32) = (0.15, 1000.0);
/// Batches that what encoders do besides is an average of.
const BESIDES: f32 = 64.0;
/// Of the link, for a byte: from 1 TB/s to 1 KB/s.
const LINK_NS: (f32, f32) = (1e-3, 1e6);
/// A thousandth of a processor.
const ENCODERS_MIN: f32 = 1e-3;
/// Batches in which the price triples, if one of both stands idle all the time.
const BATCHES: f32 = 64.0;
/// Far more, since a rare batch that takes long must count for all that it takes.
const AVERAGE_MAX: f32 = 1024.0;
/// Average ones, that lie encoded and not yet sent.
const QUEUE_BATCHES: f32 = 24.0;
/// That a single batch may move the logarithm.
const STEP_MAX: f32 = 4.0;
/// Bytes sent that the link's speed is an average of, in effect.
const LINK_BYTES: f32 = 8e6;
/// Bytes that what was known to begin with counts as.
const LINK_BYTES_KNOWN: f32 = 64e3;

impl Price {
    /// To begin with what a byte takes on the link.
    pub(super) fn of_link(bytes_per_second: u64, encoders: usize) -> Self {
        let encoders = (encoders as f32).max(1.0);
        let link_ns = (1e9 / bytes_per_second.max(1) as f32).clamp(LINK_NS.0, LINK_NS.1);
        Self {
            encoders,
            link_ns,
            link_bytes: LINK_BYTES_KNOWN,
            log: bounded((encoders * link_ns).ln()),
            batch_ns: 0.0,
            batches: 0.0,
            besides_ns: 0.0,
            besides_of_batch_ns: 0.0,
            ahead_ns: 0.0,
        }
    }

    /// So many work at a time from now on; the balance finds what that makes of the price.
    pub(super) fn set_encoders(&mut self, encoders: f32) {
        self.encoders = if encoders > ENCODERS_MIN {
            encoders
        } else {
            ENCODERS_MIN
        };
    }

    /// An encoder did something else for so long.
    pub(super) fn besides(&mut self, ns: u64) {
        self.besides_ns += ns as f32;
    }

    /// In nanoseconds of an encoder.
    pub(super) fn ns_per_byte(self) -> f32 {
        self.log.exp()
    }

    /// Of the link.
    pub(super) fn link_ns_per_byte(self) -> f32 {
        self.link_ns
    }

    /// Hears that the link took this long for so many bytes.
    pub(super) fn sent(&mut self, bytes: u64, ns: u64) {
        let bytes = (bytes as f32).max(1.0);
        let share = bytes / (bytes + self.link_bytes);
        self.link_bytes = (self.link_bytes + bytes).min(LINK_BYTES);
        let (before, is_known) = (self.link_ns, self.link_bytes == LINK_BYTES);
        self.link_ns = (before + (ns as f32 / bytes - before) * share).clamp(LINK_NS.0, LINK_NS.1);
        // As long as the price is little more than what was said of the link, what is seen of it is better. Later the
        // balance finds what is right; and a socket that takes bytes sooner than the link does must not upset it.
        if !is_known {
            self.log = bounded(self.log + (self.link_ns / before).ln());
        }
    }

    /// Hears of a batch that is going to be sent.
    pub(super) fn picked(&mut self, load: &Load) {
        let besides_ns = std::mem::take(&mut self.besides_ns);
        self.besides_of_batch_ns += (besides_ns - self.besides_of_batch_ns) / BESIDES;
        let encoder_ns = (load.ns + self.besides_of_batch_ns) / self.encoders;
        let link_ns = load.bytes * self.link_ns;
        let slower_ns = link_ns.max(encoder_ns).max(1.0);
        self.batches = (self.batches + 1.0).min(AVERAGE_MAX);
        self.batch_ns += (slower_ns - self.batch_ns) / self.batches;

        let excess_ns = link_ns - encoder_ns;
        let matters = if excess_ns > 0.0 {
            load.could_be_shorter
        } else {
            load.could_be_sooner
        };
        if matters {
            let step = self.beyond(excess_ns) / (BATCHES * self.batch_ns);
            self.log = bounded(self.log + step.clamp(-STEP_MAX, STEP_MAX));
        } else {
            // Beyond what a queue holds one of both waits, and nothing is gained from it later: what neither compresses
            // nor waits would else drive the price out of all bounds.
            let ahead_max = QUEUE_BATCHES * self.batch_ns;
            self.ahead_ns = (self.ahead_ns + excess_ns).clamp(-ahead_max, ahead_max);
        }
    }

    /// What of an excess is left once it has made up for one of the other sign that lies before.
    fn beyond(&mut self, excess_ns: f32) -> f32 {
        if self.ahead_ns * excess_ns >= 0.0 {
            return excess_ns;
        }
        let sum = self.ahead_ns + excess_ns;
        let is_made_up_for = sum * excess_ns > 0.0;
        self.ahead_ns = if is_made_up_for { 0.0 } else { sum };
        if is_made_up_for { sum } else { 0.0 }
    }
}

fn bounded(log: f32) -> f32 {
    log.clamp(NS_PER_BYTE.0.ln(), NS_PER_BYTE.1.ln())
}
