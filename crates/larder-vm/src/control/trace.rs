//! The last events of each disk: changes of its state, and messages that its server has logged. They show how a disk
//! got into its present state, for example why it hangs.
//!
//! The events are messages of the process's log, like those of [`super::events`], whose layer adds them: all messages
//! that a disk's thread logs at level `info` or above, and those at level `debug` with the field [`KIND_FIELD`]. A
//! message with that field reports a change of state, never a single request.
//!
//! Invariants:
//! - The memory of a trace is bounded ([`EVENTS_MAX`], [`BYTES_MAX`]). The oldest events are dropped, and counted.
//! - A trace is read without the disk's thread, which may hang.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::events::truncate;

/// Name of the field of a log message that gives the kind of an event. The log itself does not print the field.
pub const KIND_FIELD: &str = "event";

/// Maximum number of events in a trace.
const EVENTS_MAX: usize = 1024;

/// Maximum length of all kinds and texts in a trace, in bytes.
const BYTES_MAX: usize = 128 << 10;

/// Length in bytes to which a kind is truncated.
const KIND_BYTES_MAX: usize = 64;

/// Length in bytes to which a text is truncated.
const TEXT_BYTES_MAX: usize = 512;

/// The answer to `GET /v1/trace`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Traces {
    /// All disks that the process serves.
    pub disks: Vec<DiskEvents>,
}

/// The last events of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskEvents {
    /// Name of the disk in its VM, if it belongs to a VM.
    #[serde(default)]
    pub name: Option<String>,
    /// Number of earlier events that are not stored any more.
    pub dropped: u64,
    /// The stored events, the oldest first.
    pub events: Vec<TraceEvent>,
}

/// An event of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TraceEvent {
    /// Time, in milliseconds since 1970 (UTC).
    pub time_ms: u64,
    /// Kind of the event, such as `upstream-lost`; for other log messages their level: `info`, `warning` or `error`.
    pub kind: String,
    /// Message for the user.
    pub text: String,
}

/// The stored events of a disk.
#[derive(Default)]
pub(crate) struct DiskTrace(Mutex<EventStore>);

#[derive(Default)]
struct EventStore {
    events: VecDeque<Arc<TraceEvent>>,
    /// Length of all kinds and texts, in bytes.
    bytes: usize,
    dropped: u64,
}

thread_local! {
    /// Trace of the disk that this thread works for.
    static CURRENT: RefCell<Option<Arc<DiskTrace>>> = const { RefCell::new(None) };
}

/// Returns the trace of the disk that this thread works for, if it works for one.
pub(super) fn current() -> Option<Arc<DiskTrace>> {
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

/// Recording of this thread's messages in a trace, which ends when this is dropped.
#[must_use]
pub(crate) struct TraceRecording {
    before: Option<Arc<DiskTrace>>,
    /// The recording must end in the thread that began it.
    _this_thread: PhantomData<*const ()>,
}

impl Drop for TraceRecording {
    fn drop(&mut self) {
        let before = self.before.take();
        // This fails only while the thread ends.
        let _ = CURRENT.try_with(|current| current.replace(before));
    }
}

impl DiskTrace {
    /// Records the events that this thread logs until the result is dropped.
    pub(crate) fn record_thread(self: &Arc<Self>) -> TraceRecording {
        TraceRecording { before: CURRENT.replace(Some(Arc::clone(self))), _this_thread: PhantomData }
    }

    /// Adds an event, and drops the oldest ones as far as a bound is exceeded.
    pub(super) fn push(&self, time_ms: u64, mut kind: String, mut text: String) {
        truncate(&mut kind, KIND_BYTES_MAX);
        truncate(&mut text, TEXT_BYTES_MAX);
        let mut stored = self.lock_store();
        stored.bytes += kind.len() + text.len();
        stored.events.push_back(Arc::new(TraceEvent { time_ms, kind, text }));
        while stored.events.len() > EVENTS_MAX || stored.bytes > BYTES_MAX {
            let Some(oldest) = stored.events.pop_front() else {
                break;
            };
            stored.bytes -= oldest.kind.len() + oldest.text.len();
            stored.dropped += 1;
        }
    }

    /// Returns the stored events of the disk with this name.
    pub(super) fn events_of(&self, name: Option<&str>) -> DiskEvents {
        let (events, dropped) = {
            let stored = self.lock_store();
            (stored.events.clone(), stored.dropped)
        };
        DiskEvents {
            name: name.map(str::to_owned),
            dropped,
            events: events.iter().map(|event| (**event).clone()).collect(),
        }
    }

    fn lock_store(&self) -> MutexGuard<'_, EventStore> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::super::events;
    use super::*;

    fn texts(trace: &DiskTrace) -> Vec<String> {
        let events = trace.events_of(None).events.into_iter();
        events.map(|event| format!("{}: {}", event.kind, event.text)).collect()
    }

    /// A trace keeps the last events in their order, and counts those that it has dropped.
    #[test]
    fn trace_drops_and_counts_oldest_events() {
        let trace = DiskTrace::default();
        let count = EVENTS_MAX as u64 + 5;
        for number in 0..count {
            trace.push(number, "opened".to_owned(), number.to_string());
        }
        let found = trace.events_of(Some("vda"));
        assert_eq!((found.name.as_deref(), found.dropped), (Some("vda"), 5));
        let times: Vec<u64> = found.events.iter().map(|event| event.time_ms).collect();
        assert_eq!(times, (5..count).collect::<Vec<u64>>());
        assert_eq!(found.events[0].text, "5");
    }

    /// Long texts are truncated, and reduce the number of stored events.
    #[test]
    fn long_texts_leave_trace_bounded() {
        let trace = DiskTrace::default();
        // The truncation must not split a character of two bytes.
        let long = format!("x{}", "ä".repeat(TEXT_BYTES_MAX));
        for _ in 0..EVENTS_MAX {
            trace.push(0, "k".repeat(10 * KIND_BYTES_MAX), long.clone());
        }
        let found = trace.events_of(None);
        let ellipsis = '…'.len_utf8();
        let is_short = |event: &TraceEvent| {
            event.kind.len() <= KIND_BYTES_MAX + ellipsis && event.text.len() <= TEXT_BYTES_MAX + ellipsis
        };
        assert!(found.events.iter().all(is_short));
        let bytes = |event: &TraceEvent| event.kind.len() + event.text.len();
        assert!(found.events.iter().map(bytes).sum::<usize>() <= BYTES_MAX);
        assert_eq!(found.events.len() as u64 + found.dropped, EVENTS_MAX as u64);
        assert!(!found.events.is_empty());
    }

    /// A trace has the log messages of the threads that work for its disk: changes of state at any level with their
    /// kinds, and other messages from level `info` on.
    #[test]
    fn trace_has_messages_of_its_threads() {
        let [one, other] = [(), ()].map(|()| Arc::new(DiskTrace::default()));
        tracing::subscriber::with_default(tracing_subscriber::registry().with(events::layer()), || {
            tracing::debug!(event = "lost", "before");
            let recording = one.record_thread();
            tracing::debug!(event = "cache-bypassed", disk = "vda", delay_ms = 12, "slow");
            tracing::debug!("a detail");
            tracing::info!("limits set");
            {
                let _nested = other.record_thread();
                tracing::warn!(event = "reload", "the file");
            }
            tracing::error!(event = "upstream-lost", why = %"EOF", "no connection");
            drop(recording);
            tracing::error!("after");
        });
        assert_eq!(
            texts(&one),
            ["cache-bypassed: slow delay_ms=12", "info: limits set", "upstream-lost: no connection why=EOF"]
        );
        assert_eq!(texts(&other), ["reload: the file"]);
    }
}
