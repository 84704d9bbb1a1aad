//! Session of one front-end's connection: executes its messages, and owns the queues that it has set up.
//!
//! Failures: a message that cannot be parsed, or that requests something impossible, closes the connection (after a
//! negative acknowledgement, if the front-end asked for one); the front-end may connect again. However a connection
//! ends, its queues stop: requests in flight are finished and pushed as used, so that the next connection finds the
//! rings in a consistent state.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use larder_block::event_loop::Socket;
use larder_block::signal::{Signal, first_of};
use larder_block::{ByteLen, Loop};
use tracing::Span;

use super::QUEUE_SIZE_MAX;
use super::blk::{self, feature};
use super::frontend_state::FrontendState;
use super::handover::StoredConnection;
use super::inflight::InflightRegion;
use super::memory::{DirtyLog, GuestMemory, LostMapping, MemoryError, SLOTS_MAX};
use super::message::{self, FrontendRequest, InflightInfo, MessageError, RingAddresses, number};
use super::message_record::RecordedMessage;
use super::queue::{Queue, QueueParts, Shared};
use super::receive::{self, Received};
use super::ring::{RING_SIZE_MAX, Ring, RingLayout, RingPosition};
use crate::external_mapping::{self, PagerClient};

/// Interval of polling whether the pager has registered new mappings, at first and at last, and the time after which
/// a missing registration is logged.
const PAGER_POLL_INTERVAL_MIN: Duration = Duration::from_millis(1);
const PAGER_POLL_INTERVAL_MAX: Duration = Duration::from_millis(20);
const PAGER_WARNING_DELAY: Duration = Duration::from_secs(5);

/// Protocol features (QEMU `docs/interop/vhost-user.rst`).
mod protocol {
    pub(super) const MQ: u64 = 1 << 0;
    pub(super) const LOG_SHMFD: u64 = 1 << 1;
    pub(super) const REPLY_ACK: u64 = 1 << 3;
    pub(super) const BACKEND_REQ: u64 = 1 << 5;
    pub(super) const CONFIG: u64 = 1 << 9;
    pub(super) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(super) const RESET_DEVICE: u64 = 1 << 13;
    pub(super) const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
    pub(super) const STATUS: u64 = 1 << 16;

    pub(super) const ALL: u64 = MQ
        | LOG_SHMFD
        | REPLY_ACK
        | BACKEND_REQ
        | CONFIG
        | INFLIGHT_SHMFD
        | RESET_DEVICE
        | CONFIGURE_MEM_SLOTS
        | STATUS;
}

/// Reason why the server closed a connection.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SessionError {
    #[error("the connection broke: {0}")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Message(#[from] MessageError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error("{0}; the front-end may reconnect, and its requests in flight are then resubmitted")]
    LostMemory(LostMapping),
    #[error("there is no queue {ring}; the disk has {queues}")]
    NoSuchQueue { ring: u32, queues: u16 },
    #[error(
        "queue {ring} with {size} descriptors; a ring has {} to {RING_SIZE_MAX}, and a split ring a power of two",
        1
    )]
    RingSize { ring: u32, size: u32 },
    #[error("features {wanted:#x}, of which {:#x} were not offered", wanted & !offered)]
    Features { wanted: u64, offered: u64 },
    #[error("queue {0} was changed while it runs")]
    Running(u32),
    #[error("an in-flight region for {0} queues of {1} descriptors is not possible")]
    InflightSize(u16, u16),
}

/// Setup of one ring by the front-end.
#[derive(Default)]
struct RingSetup {
    size: u32,
    addresses: Option<RingAddresses>,
    base: u32,
    /// Position that the front-end assumes, if it has set it in this process.
    frontend_base: Option<u32>,
    kick: Option<Rc<OwnedFd>>,
    /// True after SET_VRING_KICK, with or without a descriptor: the ring is started.
    started: bool,
    call: Option<Rc<OwnedFd>>,
    enabled: bool,
    queue: Option<Rc<Queue>>,
    /// True if the ring has run on this connection.
    has_run: bool,
    /// True if the ring is started, but was stopped because its guest memory was unmapped.
    unmapped: bool,
}

/// Time within which the rest of a message must arrive when this process is about to end.
const MESSAGE_REST_TIMEOUT: Duration = Duration::from_secs(1);

/// Regular end of a connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionEnd {
    /// The front-end closed the connection.
    Closed,
    /// The connection is left to the next process.
    HandedOver,
}

/// Signal to a session to leave its connection to the next process.
#[derive(Default)]
pub(super) struct HandoverSignal {
    is_requested: Cell<bool>,
    changed: Signal,
}

impl HandoverSignal {
    /// Asks the session to leave as soon as no message is being handled.
    pub(super) fn request(&self) {
        self.is_requested.set(true);
        self.changed.raise();
    }

    pub(super) async fn requested(&self) {
        self.changed.when(|| self.is_requested.get()).await;
    }
}

pub(super) struct Session {
    on: Loop,
    socket: Rc<Socket>,
    shared: Rc<Shared>,
    queues_max: u16,
    features: u64,
    protocol_features: u64,
    status: u64,
    memory: Rc<GuestMemory>,
    rings: Vec<RingSetup>,
    inflight: Option<Rc<InflightRegion>>,
    log: Option<Rc<DirtyLog>>,
    backend_channel: Rc<RefCell<Option<Socket>>>,
    /// Size that was reported to the front-end on this connection.
    reported_size: Option<ByteLen>,
    /// State kept for the next process.
    stored: Option<StoredConnection>,
    handover: Rc<HandoverSignal>,
    /// True while messages are replayed that the previous process received.
    is_replaying: bool,
    /// Names the session in messages about changes of its state.
    span: Span,
}

impl Session {
    pub(super) fn new(
        on: &Loop,
        socket: Rc<Socket>,
        shared: Rc<Shared>,
        queues_max: u16,
        handover: Rc<HandoverSignal>,
        span: Span,
    ) -> Self {
        Self {
            on: on.clone(),
            socket,
            shared,
            queues_max,
            features: 0,
            protocol_features: 0,
            status: 0,
            memory: Rc::default(),
            rings: (0..queues_max).map(|_| RingSetup::default()).collect(),
            inflight: None,
            log: None,
            backend_channel: Rc::default(),
            reported_size: None,
            stored: None,
            handover,
            is_replaying: false,
            span,
        }
    }

    /// Returns the channel for messages to the front-end, which is set once the front-end has opened it.
    pub(super) fn backend_channel(&self) -> Rc<RefCell<Option<Socket>>> {
        Rc::clone(&self.backend_channel)
    }

    /// Keeps messages for the next process, beginning with those that the previous process left.
    pub(super) fn set_stored_connection(&mut self, stored: StoredConnection) {
        self.stored = Some(stored);
    }

    /// Serves the connection until it ends.
    pub(super) async fn run(&mut self) -> Result<SessionEnd, SessionError> {
        let result = self.serve().await;
        let handed_over = matches!(result, Ok(SessionEnd::HandedOver)) && self.stored.is_some();
        if !handed_over {
            self.socket.shutdown();
        }
        let (packed, running) = (self.is_packed(), self.running_queues());
        tracing::debug!(parent: &self.span, handed_over, "the session ends; requests in flight are being completed");
        for (index, ring) in self.rings.iter_mut().enumerate() {
            let Some(queue) = ring.queue.take() else { continue };
            let base = queue.stop().await.to_base(packed);
            if let Some(stored) = &mut self.stored {
                stored.set_ring_base(index as u32, base);
            }
        }
        self.log_stop(running);
        *self.shared.dirty_log.borrow_mut() = None;
        match self.stored.take() {
            Some(stored) if handed_over => {
                if let Err(error) = stored.hand_over() {
                    warn_not_stored(&error);
                    self.socket.shutdown();
                }
            }
            Some(stored) => stored.remove(&self.on).await,
            None => {}
        }
        result.map(|_| if handed_over { SessionEnd::HandedOver } else { SessionEnd::Closed })
    }

    async fn serve(&mut self) -> Result<SessionEnd, SessionError> {
        self.shared.lost_memory.reset();
        let recorded = self.stored.as_ref().map(|stored| receive::reparse(stored.messages())).transpose()?;
        let recorded = recorded.unwrap_or_default();
        let is_resumed = !recorded.is_empty();
        self.is_replaying = true;
        for request in recorded {
            self.execute(request).await?;
        }
        self.is_replaying = false;
        if is_resumed {
            tracing::info!(
                parent: &self.span, event = "guest-continued", disk = %self.shared.device.name(),
                "the front-end's connection continues"
            );
        }
        loop {
            if !self.wait_for_message().await? {
                return Ok(SessionEnd::HandedOver);
            }
            match self.receive_next().await? {
                None => return Ok(SessionEnd::Closed),
                Some(received) => self.answer(received).await?,
            }
        }
    }

    /// Waits for a message; returns false if this process is about to end.
    ///
    /// # Errors
    /// Memory of the front-end is lost.
    async fn wait_for_message(&self) -> Result<bool, SessionError> {
        let requested = async {
            self.handover.requested().await;
            Ok(false)
        };
        let readable = async {
            // Errors are reported by the next read.
            let _ = self.socket.readable().await;
            Ok(true)
        };
        let lost = async { Err(SessionError::LostMemory(self.shared.lost_memory.wait().await)) };
        first_of(lost, first_of(requested, readable)).await
    }

    /// Receives the next message; returns `None` if the front-end has closed the connection between two messages.
    async fn receive_next(&mut self) -> Result<Option<Received>, SessionError> {
        if let Some(stored) = &self.stored {
            stored.begin_message()?;
        }
        let timed_out = async {
            self.handover.requested().await;
            self.on.sleep(MESSAGE_REST_TIMEOUT).await;
            Err(io::Error::from(io::ErrorKind::TimedOut).into())
        };
        first_of(receive::next(&self.socket, self.stored.is_some()), timed_out).await
    }

    async fn answer(&mut self, received: Received) -> Result<(), SessionError> {
        let Received { header, request, raw } = received;
        // A front-end that asks for an acknowledgement waits for it, even if REPLY_ACK was negotiated with a previous
        // server only: QEMU before 9.1 may continue like that after a server was killed.
        let acknowledge = header.need_reply;
        let number = header.request;
        let result = self.execute(request).await;
        let reply = match &result {
            Ok(Reply::Bytes(bytes) | Reply::WithFile(bytes, _)) => Some(bytes.clone()),
            Ok(Reply::Position { ring, base }) => Some(message::reply_ring(number, *ring, *base)),
            Ok(Reply::None) if acknowledge => Some(message::reply_u64(number, 0)),
            Ok(Reply::None) => None,
            Err(error) if acknowledge => {
                tracing::error!(parent: &self.span, "vhost-user request {number} refused: {error}");
                Some(message::reply_u64(number, 1))
            }
            Err(_) => None,
        };
        let reply = reply.map(|bytes| RecordedMessage::new(bytes, Vec::new()));
        // The message is recorded before it is answered, because the front-end may rely on it from then on.
        if let (Some(stored), Some(raw)) = (&mut self.stored, raw) {
            let recorded = stored.record(&self.on, raw, reply.as_ref()).await;
            self.drop_stored_on_error(recorded).await;
        }
        match (result, reply.as_ref().map(RecordedMessage::bytes)) {
            (Ok(Reply::WithFile(_, file)), Some(reply)) => {
                self.socket.write_with_descriptors(reply, &[file.as_fd()]).await?;
            }
            (Ok(Reply::Position { ring, .. }), Some(reply)) => {
                self.socket.write_all(reply).await?;
                // The in-flight record is retired only now. A crash before the reply must leave the position in it,
                // because no other place has it.
                self.invalidate_inflight(ring);
                self.shared.active_queues.remove(ring as u16);
            }
            (_, Some(reply)) => self.socket.write_all(reply).await?,
            (Err(error), None) => return Err(error),
            (Ok(_), None) => {}
        }
        if let Some(stored) = &self.stored {
            let recorded = stored.end_message();
            self.drop_stored_on_error(recorded).await;
        }
        Ok(())
    }

    /// If recording failed, stops keeping the connection and continues without.
    async fn drop_stored_on_error(&mut self, recorded: io::Result<()>) {
        let Err(error) = recorded else { return };
        warn_not_stored(&error);
        if let Some(stored) = self.stored.take() {
            stored.remove(&self.on).await;
        }
    }

    async fn execute(&mut self, request: FrontendRequest) -> Result<Reply, SessionError> {
        match request {
            FrontendRequest::GetFeatures => return Ok(Reply::u64(number::GET_FEATURES, self.offered_features())),
            FrontendRequest::SetFeatures(features) => self.set_features(features)?,
            FrontendRequest::SetOwner | FrontendRequest::SetLogEvent => {}
            FrontendRequest::ResetOwner => self.stop_all().await,
            FrontendRequest::ResetDevice => {
                tracing::debug!(parent: &self.span, event = "device-reset", "the front-end resets the device");
                self.stop_all().await;
                (0..u32::from(self.queues_max)).for_each(|ring| self.invalidate_inflight(ring));
                self.shared.active_queues.clear();
                self.rings.fill_with(RingSetup::default);
                self.features = 0;
                self.status = 0;
                self.update_log();
            }
            FrontendRequest::GetProtocolFeatures => {
                return Ok(Reply::u64(number::GET_PROTOCOL_FEATURES, protocol::ALL));
            }
            FrontendRequest::SetProtocolFeatures(features) => {
                if features & !protocol::ALL != 0 {
                    return Err(SessionError::Features { wanted: features, offered: protocol::ALL });
                }
                self.protocol_features = features;
            }
            FrontendRequest::GetQueueCount => {
                return Ok(Reply::u64(number::GET_QUEUE_NUM, u64::from(self.queues_max)));
            }
            FrontendRequest::GetMaxMemSlots => {
                return Ok(Reply::u64(number::GET_MAX_MEM_SLOTS, SLOTS_MAX as u64));
            }
            FrontendRequest::GetStatus => return Ok(Reply::u64(number::GET_STATUS, self.status)),
            FrontendRequest::SetStatus(status) => {
                self.status = status;
                if status == 0 {
                    // QEMU before 8.1 sends this when the guest is only paused, and fetches the rings' positions
                    // afterwards.
                    self.stop_all().await;
                }
            }
            FrontendRequest::SetMemTable(regions) => {
                let mut memory = GuestMemory::default();
                let mut files = Vec::with_capacity(regions.len());
                for (info, file) in regions {
                    memory = memory.with(info, &file)?;
                    files.push(file);
                }
                self.wait_for_pager(&files).await;
                self.replace_memory(memory).await;
            }
            FrontendRequest::AddMemRegion(info, file) => {
                let memory = self.memory.with(info, &file)?;
                self.wait_for_pager(&[file]).await;
                self.replace_memory(memory).await;
            }
            FrontendRequest::RemMemRegion(info) => {
                let memory = self.memory.without(info)?;
                self.replace_memory(memory).await;
            }
            FrontendRequest::SetLogBase { bytes, file_offset, file } => {
                self.log = Some(Rc::new(DirtyLog::new(&file, file_offset, bytes)?));
                self.update_log();
                return Ok(Reply::u64(number::SET_LOG_BASE, 0));
            }
            FrontendRequest::SetBackendChannel(file) => {
                *self.backend_channel.borrow_mut() = Some(Socket::from_descriptor(&self.on, file)?);
            }
            FrontendRequest::GetConfig { offset, len } => return Ok(Reply::Bytes(self.read_config(offset, len))),
            FrontendRequest::SetConfig { offset, bytes } => {
                if let Some(on) = blk::write_cache_in(offset, &bytes) {
                    self.set_write_cache(on).await;
                }
            }
            FrontendRequest::GetInflight(info) => return self.create_inflight(&info),
            FrontendRequest::SetInflight(info, file) => {
                self.adopt_inflight(InflightRegion::adopt(&info, &file, self.is_packed())?);
            }
            other => return self.ring_request(other).await,
        }
        Ok(Reply::None)
    }

    async fn ring_request(&mut self, request: FrontendRequest) -> Result<Reply, SessionError> {
        match request {
            FrontendRequest::SetRingSize { ring, size } => {
                let packed = self.is_packed();
                if size == 0 || size > RING_SIZE_MAX || (!packed && !size.is_power_of_two()) {
                    return Err(SessionError::RingSize { ring, size });
                }
                self.idle_ring(ring)?.size = size;
            }
            FrontendRequest::SetRingAddresses { ring, addresses } => self.set_addresses(ring, addresses).await?,
            FrontendRequest::SetRingBase { ring, base } => {
                let is_replaying = self.is_replaying;
                let setup = self.idle_ring(ring)?;
                setup.base = base;
                setup.frontend_base = (!is_replaying).then_some(base);
                // A ring that is new on this connection may continue from a previous server's in-flight record, which
                // is more accurate.
                if setup.has_run {
                    self.invalidate_inflight(ring);
                }
            }
            FrontendRequest::GetRingBase { ring } => {
                self.stop_ring(ring).await?;
                let setup = self.ring(ring)?;
                setup.started = false;
                setup.kick = None;
                return Ok(Reply::Position { ring, base: setup.base });
            }
            FrontendRequest::SetRingKick { ring, event } => {
                let event = event.map(prepare_event).transpose()?;
                self.stop_ring(ring).await?;
                let setup = self.ring(ring)?;
                setup.kick = event;
                setup.started = true;
                self.start_ring(ring)?;
            }
            FrontendRequest::SetRingCall { ring, event } => {
                let event = event.map(prepare_event).transpose()?;
                let setup = self.ring(ring)?;
                setup.call = event;
                if let Some(queue) = &setup.queue {
                    queue.set_call(setup.call.clone());
                }
            }
            FrontendRequest::SetRingError { ring, event } => {
                // Errors are logged instead; no known front-end uses this event.
                drop(event);
                self.ring(ring)?;
            }
            FrontendRequest::SetRingEnable { ring, enable } => {
                let setup = self.ring(ring)?;
                setup.enabled = enable;
                if let Some(queue) = &setup.queue {
                    queue.set_enabled(enable);
                }
            }
            other => unreachable!("{other:?} is not about a ring"),
        }
        Ok(Reply::None)
    }

    fn offered_features(&self) -> u64 {
        blk::features(&self.shared.geometry())
    }

    fn is_packed(&self) -> bool {
        self.features & feature::RING_PACKED != 0
    }

    fn set_features(&mut self, features: u64) -> Result<(), SessionError> {
        let offered = self.offered_features();
        if features & !offered != 0 {
            return Err(SessionError::Features { wanted: features, offered });
        }
        let changed = features ^ self.features;
        let running = self.rings.iter().position(|ring| ring.queue.is_some());
        if let (Some(ring), true) = (running, changed & !feature::LOG_ALL != 0) {
            return Err(SessionError::Running(ring as u32));
        }
        tracing::debug!(parent: &self.span, "features {:#x} are negotiated", features);
        self.features = features;
        // A driver that cannot flush relies on the durability of every write (virtio 1.2, 5.2.6.2).
        self.shared.driver_flushes.set(features & (feature::FLUSH | feature::CONFIG_WCE) != 0);
        self.update_log();
        Ok(())
    }

    fn update_log(&self) {
        let log = self.log.clone().filter(|_| self.features & feature::LOG_ALL != 0);
        *self.shared.dirty_log.borrow_mut() = log;
    }

    fn read_config(&mut self, offset: u32, len: u32) -> Vec<u8> {
        // Limit of the protocol on the configuration space (VHOST_USER_MAX_CONFIG_SIZE).
        if offset.checked_add(len).is_none_or(|end| end > 256) {
            return message::reply_config(offset, &[]);
        }
        let geometry = self.shared.geometry();
        if self.inflight.is_none() && self.rings.iter().all(|ring| !ring.has_run) {
            // The device is new, so the recorded active queues are obsolete. For a device that had run, the front-end
            // hands over the in-flight region and starts the rings before it reads the configuration.
            self.shared.active_queues.clear();
        }
        if offset == 0 && len >= 8 {
            self.reported_size = Some(geometry.size);
            if let Some(state) = self.frontend_state() {
                state.set_reported_size(geometry.size);
            }
        }
        let queues = blk::QueueParameters { count: self.queues_max, size: self.shared.queue_size };
        let bytes = blk::config(&geometry, queues, self.shared.write_cache.get(), offset, len);
        message::reply_config(offset, &bytes)
    }

    fn create_inflight(&self, info: &InflightInfo) -> Result<Reply, SessionError> {
        let is_valid =
            (1..=self.queues_max).contains(&info.queues) && (1..=RING_SIZE_MAX).contains(&u32::from(info.queue_size));
        if !is_valid {
            return Err(SessionError::InflightSize(info.queues, info.queue_size));
        }
        if self.rings.iter().all(|ring| ring.queue.is_none()) {
            // No queue runs, so recorded active queues belong to an earlier guest, or to this one before its reset.
            self.shared.active_queues.clear();
        }
        let write_cache = self.shared.write_cache.get();
        // QEMU 10 requests the size that its user configured, and may nevertheless use rings of 1024.
        let queue_size = info.queue_size.max(QUEUE_SIZE_MAX);
        let (created, file) = InflightRegion::create(info.queues, queue_size, self.is_packed(), write_cache)?;
        Ok(Reply::WithFile(message::reply_inflight(&created), file))
    }

    fn frontend_state(&self) -> Option<&FrontendState> {
        self.inflight.as_ref().and_then(|region| region.frontend_state())
    }

    /// Adopts the in-flight region of a previous server, and notifies a guest that missed a change of the size
    /// meanwhile.
    fn adopt_inflight(&mut self, region: InflightRegion) {
        tracing::debug!(parent: &self.span, "the front-end passes an in-flight region: {region}");
        let size = self.shared.geometry().size;
        if let Some(state) = region.frontend_state() {
            if !state.write_cache() {
                self.shared.write_cache.set(false);
            }
            state.set_write_cache(self.shared.write_cache.get());
            match state.reported_size() {
                Some(reported) if reported != size && self.reported_size.is_none() => {
                    self.on.spawn(announce_size(Rc::clone(&self.backend_channel)));
                }
                Some(_) => {}
                None => state.set_reported_size(self.reported_size.unwrap_or(size)),
            }
        }
        self.inflight = Some(Rc::new(region));
    }

    async fn set_write_cache(&mut self, on: bool) {
        let before = self.shared.write_cache.replace(on);
        if before != on {
            tracing::debug!(parent: &self.span, event = "write-cache", on, "the guest sets its write cache");
        }
        if let Some(state) = self.frontend_state() {
            state.set_write_cache(on);
        }
        // A driver without a cache sends no flush, so writes that were cached until now must be flushed here.
        let must_flush = before && !on && !self.shared.geometry().read_only;
        if must_flush && let Err(error) = self.shared.device.flush().await {
            tracing::error!(parent: &self.span, event = "flush-failed", "{error}");
        }
    }

    fn ring(&mut self, ring: u32) -> Result<&mut RingSetup, SessionError> {
        let queues = self.queues_max;
        self.rings.get_mut(ring as usize).ok_or(SessionError::NoSuchQueue { ring, queues })
    }

    fn idle_ring(&mut self, ring: u32) -> Result<&mut RingSetup, SessionError> {
        let setup = self.ring(ring)?;
        if setup.queue.is_some() {
            return Err(SessionError::Running(ring));
        }
        Ok(setup)
    }

    async fn set_addresses(&mut self, ring: u32, addresses: RingAddresses) -> Result<(), SessionError> {
        let setup = self.ring(ring)?;
        let before = setup.addresses.replace(addresses);
        let Some(queue) = &setup.queue else { return Ok(()) };
        let moved = before.is_none_or(|before| {
            (before.descriptors, before.driver, before.device)
                != (addresses.descriptors, addresses.driver, addresses.device)
        });
        if moved {
            self.stop_ring(ring).await?;
            self.start_ring(ring)?;
        } else {
            queue.set_log_ring(addresses.log);
        }
        Ok(())
    }

    async fn stop_ring(&mut self, ring: u32) -> Result<(), SessionError> {
        let (packed, running) = (self.is_packed(), self.running_queues());
        let span = self.span.clone();
        let setup = self.ring(ring)?;
        if let Some(queue) = setup.queue.take() {
            tracing::debug!(parent: &span, queue = ring, "the queue is being stopped");
            setup.base = queue.stop().await.to_base(packed);
            tracing::debug!(parent: &span, queue = ring, base = setup.base, "the queue has stopped");
        }
        self.log_stop(running);
        Ok(())
    }

    /// Returns the number of running queues.
    fn running_queues(&self) -> usize {
        self.rings.iter().filter(|ring| ring.queue.is_some()).count()
    }

    /// Logs that the last queue has stopped, of `before` that were running.
    fn log_stop(&self, before: usize) {
        if before > 0 && self.running_queues() == 0 {
            tracing::debug!(parent: &self.span, event = "queues-stopped", "no queue of the guest runs any more");
        }
    }

    /// Invalidates the in-flight record of a ring: its next start takes the position from the front-end.
    fn invalidate_inflight(&mut self, ring: u32) {
        let packed = self.is_packed();
        let Ok(size) = self.ring(ring).map(|setup| setup.size as u16) else {
            return;
        };
        let record = self.inflight.as_ref().and_then(|region| region.queue(ring as u16, size, packed));
        if let Some(mut record) = record {
            record.invalidate();
        }
    }

    /// Stops every ring as GET_VRING_BASE does, and keeps its position.
    async fn stop_all(&mut self) {
        let (packed, running) = (self.is_packed(), self.running_queues());
        for ring in &mut self.rings {
            if let Some(queue) = ring.queue.take() {
                ring.base = queue.stop().await.to_base(packed);
            }
            ring.started = false;
            ring.kick = None;
        }
        self.log_stop(running);
    }

    fn layout(&self, size: u32) -> RingLayout {
        RingLayout { packed: self.is_packed(), event_index: self.features & feature::EVENT_IDX != 0, size }
    }

    /// Starts a ring, if its setup is complete.
    fn start_ring(&mut self, ring: u32) -> Result<(), SessionError> {
        let size = self.ring(ring)?.size;
        let layout = self.layout(size);
        // Without this feature there is no enable message: rings are enabled from the start.
        let always_enabled = self.features & feature::PROTOCOL_FEATURES == 0;
        let (memory, inflight) = (Rc::clone(&self.memory), self.inflight.clone());
        let (on, shared) = (self.on.clone(), Rc::clone(&self.shared));
        let span = self.span.clone();
        let setup = self.ring(ring)?;
        let (true, Some(addresses)) = (setup.started && setup.queue.is_none(), setup.addresses) else {
            return Ok(());
        };
        // The layout may have been negotiated after the size was set.
        if setup.size == 0 || (!layout.packed && !setup.size.is_power_of_two()) {
            return Err(SessionError::RingSize { ring, size: setup.size });
        }
        let record = inflight.as_ref().and_then(|region| region.queue(ring as u16, setup.size as u16, layout.packed));
        if inflight.is_some() && record.is_none() {
            tracing::warn!(
                parent: &span,
                queue = ring,
                size = setup.size,
                packed = layout.packed,
                region = inflight.as_ref().map(|region| region.to_string()),
                "the in-flight region has no space for this queue"
            );
        }
        let position = RingPosition::from_base(setup.base, layout.packed);
        let mapped_ring = Ring::new(&memory, layout, &addresses, position)?;
        let index = ring as u16;
        setup.has_run = true;
        // Marked active before it takes any request.
        shared.active_queues.insert(index);
        setup.queue = Some(Queue::start(
            &on,
            QueueParts {
                index,
                shared,
                ring: mapped_ring,
                memory,
                size: setup.size,
                inflight: record,
                frontend_base: setup.frontend_base,
                kick: setup.kick.clone(),
                call: setup.call.clone(),
                enabled: setup.enabled || always_enabled,
                log_ring: addresses.log,
            },
        ));
        tracing::debug!(parent: &span, queue = ring, size, base = setup.base, "the queue has started");
        if self.running_queues() == 1 {
            tracing::debug!(parent: &span, event = "queues-started", "the guest starts its first queue");
        }
        Ok(())
    }

    /// Waits for the pager, if the memory in these files is managed. The memory was mapped and not touched yet; the
    /// pager must register the mapping before it can page in missing pages.
    async fn wait_for_pager(&self, files: &[OwnedFd]) {
        let is_managed = |file: &&OwnedFd| {
            external_mapping::is_managed(file.as_fd()).unwrap_or_else(|error| {
                tracing::warn!("cannot find out whether guest memory is managed: {error}");
                false
            })
        };
        let managed: Vec<&OwnedFd> = files.iter().filter(is_managed).collect();
        let (Some(first), Ok(view)) = (managed.first(), PagerClient::instance()) else {
            return;
        };
        let registration = view.request_registration(first.as_fd());
        tracing::debug!(parent: &self.span, "waiting until the pager has registered the guest's memory");
        let (since, mut has_warned, mut interval) = (self.on.now(), false, PAGER_POLL_INTERVAL_MIN);
        while !view.is_registered(registration) && managed.iter().any(is_managed) {
            if !has_warned && self.on.now().since(since) > PAGER_WARNING_DELAY {
                has_warned = true;
                tracing::warn!(
                    parent: &self.span, event = "pager-waits",
                    "larder memory manages the guest's memory, and does not respond: the guest's requests wait \
                     until it responds or is restarted"
                );
            }
            self.on.sleep(interval).await;
            interval = (interval * 2).min(PAGER_POLL_INTERVAL_MAX);
        }
        if has_warned {
            tracing::info!(
                parent: &self.span, event = "pager-answers",
                "larder memory responds: the guest's requests continue"
            );
        }
    }

    /// Moves every running queue to a new table of guest memory. A queue whose ring is not in the table stops, and
    /// starts again once it is: a front-end that changes the bounds of a region removes it first, then adds it anew.
    async fn replace_memory(&mut self, memory: GuestMemory) {
        tracing::debug!(parent: &self.span, event = "memory-mapped", "the front-end changes the guest's memory");
        let memory = Rc::new(memory);
        self.memory = Rc::clone(&memory);
        let span = self.span.clone();
        for index in 0..self.rings.len() {
            let layout = self.layout(self.rings[index].size);
            let setup = &mut self.rings[index];
            let (Some(queue), Some(addresses)) = (&setup.queue, setup.addresses) else {
                continue;
            };
            match Ring::new(&memory, layout, &addresses, queue.position()) {
                Ok(ring) => queue.replace_memory(Rc::clone(&memory), ring),
                Err(error) => {
                    tracing::error!(parent: &span, event = "queue-failed", queue = index, "stopped: {error}");
                    let queue = setup.queue.take();
                    if let Some(queue) = queue {
                        let base = queue.stop().await.to_base(layout.packed);
                        setup.base = base;
                        setup.unmapped = true;
                    }
                }
            }
        }
        for index in 0..self.rings.len() {
            let unmapped = std::mem::take(&mut self.rings[index].unmapped);
            if unmapped && self.start_ring(index as u32).is_err() {
                self.rings[index].unmapped = true;
            }
        }
    }
}

/// Logs that the connection is not kept for the next process.
pub(super) fn warn_not_stored(error: &io::Error) {
    tracing::warn!(
        "the connection to the front-end is not stored for the next process, so the front-end reconnects after a restart: {error}"
    );
}

/// Notifies the front-end of a change of the configuration space, if it has opened a channel for that.
pub(super) async fn announce_size(channel: Rc<RefCell<Option<Socket>>>) {
    let taken = channel.borrow_mut().take();
    let Some(socket) = taken else { return };
    if let Err(error) = socket.write_all(&message::config_change()).await {
        tracing::warn!(event = "size-changed", "cannot notify the front-end of the new size: {error}");
    }
    channel.borrow_mut().get_or_insert(socket);
}

/// Makes an event of the front-end non-blocking, so that it can never block the disk's thread.
fn prepare_event(event: OwnedFd) -> Result<Rc<OwnedFd>, SessionError> {
    rustix::io::ioctl_fionbio(&event, true).map_err(std::io::Error::from)?;
    Ok(Rc::new(event))
}

enum Reply {
    None,
    Bytes(Vec<u8>),
    /// Position of a stopped ring.
    Position {
        ring: u32,
        base: u32,
    },
    WithFile(Vec<u8>, OwnedFd),
}

impl Reply {
    fn u64(request: u32, value: u64) -> Self {
        Self::Bytes(message::reply_u64(request, value))
    }
}
