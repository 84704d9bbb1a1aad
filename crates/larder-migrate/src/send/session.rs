//! Session with a receiver, over successive links.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use larder_codec::batch::Method;
use larder_codec::select::{REGIONS_MAX, Selector, SenderProfile};

use super::channel::{ReadState, SourceChannel};
use super::connector::{Connector, LinkConnections};
use super::lane_output::LaneOutput;
use super::poller::Poller;
use super::return_path::{self, ReturnEvent, ReturnSender};
use super::{SendError, Steering, lock};
use crate::base::{Frontier, Slots};
use crate::control::{CLOSE_TIMEOUT, Control, ControlError, Mailbox};
use crate::decode::Bases;
use crate::encode::{Codecs, FrameSequencer};
use crate::limits::SharedLimits;
use crate::link::Link;
use crate::notes::Notes;
use crate::progress::SenderProgress;
use crate::rate_limiter::RateLimiter;
use crate::session::{SessionOutcome, SessionSide};
use crate::stream::Blocks;
use crate::wire::{Message, MessageKind, Welcome};

/// Pause between two reconnection attempts: the first, and the maximum.
const RECONNECT_DELAY_MIN: Duration = Duration::from_millis(50);
const RECONNECT_DELAY_MAX: Duration = Duration::from_secs(1);

pub(super) struct SendSession<'a> {
    pub(super) poller: Poller,
    pub(super) mailbox: Arc<Mailbox>,
    notes: Notes,
    channels: Mutex<Channels>,
    blocks: Blocks,
    pub(super) sequencer: FrameSequencer,
    /// Outputs of the lanes.
    pub(super) outputs: Vec<LaneOutput>,
    pub(super) welcome: Welcome,
    pub(super) limits: Arc<SharedLimits>,
    pub(super) link_limiter: RateLimiter,
    /// Limiter of the lanes' CPU time.
    pub(super) cpu_limiter: RateLimiter,
    /// Time for which a lost link is reconnected.
    pub(super) patience: Duration,
    pub(super) progress: &'a SenderProgress,
    steering: &'a Steering,
    end_sent: AtomicBool,
    /// Set once the receiver has sent END too.
    ended: AtomicBool,
    pub(super) outcome: SessionOutcome<SendError>,
}

#[derive(Default)]
struct Channels {
    /// All channels, by number.
    all: Vec<Arc<SourceChannel>>,
    /// Number of channels that are not closed by both QEMUs.
    open: usize,
}

impl SessionSide for SendSession<'_> {
    type Error = SendError;
    const THREAD: &'static str = "larder-send";

    fn outcome(&self) -> &SessionOutcome<SendError> {
        &self.outcome
    }

    fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    fn ended(&self) -> &AtomicBool {
        &self.ended
    }

    fn shutdown(&self) {
        self.sequencer.bases.frontier.stop();
        self.poller.stop();
        self.outputs.iter().for_each(LaneOutput::stop);
    }
}

impl<'a> SendSession<'a> {
    pub(super) fn new(
        mailbox: Arc<Mailbox>,
        notes: Notes,
        welcome: Welcome,
        connector: &Connector,
        limits: Arc<SharedLimits>,
        codecs: &[Codecs],
        (progress, steering): (&'a SenderProgress, &'a Steering),
    ) -> Result<Self, SendError> {
        let bases = Bases { slots: Slots::new(welcome.delta_memory), frontier: Frontier::new() };
        Ok(Self {
            poller: Poller::new().map_err(SendError::io("setting up epoll"))?,
            mailbox,
            notes,
            channels: Mutex::default(),
            blocks: Blocks::new(),
            sequencer: FrameSequencer::new(bases, selector(&welcome, codecs)),
            outputs: codecs.iter().map(|_| LaneOutput::default()).collect(),
            welcome,
            limits,
            link_limiter: RateLimiter::new(),
            cpu_limiter: RateLimiter::new(),
            patience: connector.patience(),
            progress,
            steering,
            end_sent: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            outcome: SessionOutcome::new(),
        })
    }

    pub(super) fn run(
        self,
        connector: Connector,
        connected: LinkConnections,
        codecs: Vec<Codecs>,
        listener: &UnixListener,
    ) -> Result<(), SendError> {
        listener.set_nonblocking(true).map_err(SendError::io("the socket for QEMU"))?;
        thread::scope(|scope| {
            let session = &self;
            let (return_sender, return_receiver) = ReturnSender::new();
            session.spawn(scope, "the return path", move || session.forward_return_path(&return_receiver));
            session.spawn(scope, "the control connection", move || {
                let result = session.run_links(scope, connector, connected, &return_sender);
                session.mailbox.end();
                if result.is_ok() {
                    session.shutdown();
                }
                result
            });
            let (running, all_ended) = mpsc::channel::<()>();
            for (output, codecs) in session.outputs.iter().zip(codecs) {
                let running = running.clone();
                session.spawn(scope, "a lane", move || {
                    let _running = running;
                    session.run_lane(output, codecs)
                });
            }
            drop(running);
            session.run_task("accepting QEMU's connections", || session.accept(listener));
            session.notes.end();
            // The session is over; lanes that are not blocked send their orderly end to the receiver.
            let _ = all_ended.recv_timeout(CLOSE_TIMEOUT);
            session.outcome.shut();
        });
        self.outcome.into_error().map_or(Ok(()), Err)
    }

    /// Exchanges messages with the receiver, over successive links, until the session ends.
    fn run_links<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        mut connector: Connector,
        mut connected: LinkConnections,
        return_sender: &ReturnSender,
    ) -> Result<(), SendError> {
        loop {
            let number = connected.number;
            for (lane, (link, received)) in (0..).zip(connected.lanes) {
                self.resume_lane(scope, lane, number, link, received);
            }
            let control = connected.control;
            let handle = control.handle().map_err(SendError::io("the control connection"))?;
            self.outcome.sockets.add(number, handle, true);
            let control = Control::new(control, number, &self.mailbox, !self.patience.is_zero())
                .map_err(SendError::io("the control connection"))?;
            let lost = match control.exchange(|message| self.handle_result(message, return_sender)) {
                Ok(()) => return Ok(()),
                Err(error) if self.patience.is_zero() || !error.is_symptom() => return Err(error.into()),
                Err(error) => error,
            };
            self.outcome.sockets.shut_link(number);
            self.progress.mark_link_lost();
            // After a failure the session closes the connection itself, and is only trying to send the reason.
            if !self.outcome.has_failed() {
                tracing::warn!("link lost ({lost}); reconnecting");
            }
            match self.reconnect(&mut connector, lost)? {
                Some(new_connections) => connected = new_connections,
                None => return Ok(()),
            }
            if let Err(error) = self.mailbox.resume(connected.received) {
                // The new link can carry the reason to the receiver.
                self.fail(error.into());
            }
            let outage = self.progress.mark_link_restored();
            tracing::info!("the link was restored after {:.1} s", outage.as_secs_f64());
        }
    }

    /// Resumes a lane over this link: sends the frames after the first `received`, which the receiver lacks.
    fn resume_lane<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        lane: u16,
        number: u32,
        link: Link,
        received: u64,
    ) {
        let Some(output) = self.outputs.get(usize::from(lane)) else {
            return;
        };
        let added = link
            .handle()
            .map(|handle| self.outcome.sockets.add(number, handle, false))
            .map_err(SendError::io("a lane"));
        let resumed = || output.resume(received).map_err(invalid_count(lane, received));
        if let Err(error) = added.and_then(|()| resumed()) {
            return self.fail(error);
        }
        // Repeating may take long, and the control connection must be read meanwhile.
        self.spawn(scope, "resending frames", move || {
            if let Err(error) = output.resume_over(link, number, received) {
                tracing::debug!("lane {lane}: {error}");
                self.mailbox.mark_lane_lost(number);
            }
            Ok(())
        });
    }

    /// Records that the receiver has `count` frames of a lane.
    fn record_receipt(&self, lane: u16, count: u64) -> Result<(), SendError> {
        let confirmed = match self.outputs.get(usize::from(lane)) {
            Some(out) => out.confirm(count),
            None => Err((0, 0)),
        };
        confirmed.map_err(invalid_count(lane, count))
    }

    /// Tries to reconnect until the patience is exhausted; returns `None` if the session is over.
    fn reconnect(&self, connector: &mut Connector, lost: ControlError) -> Result<Option<LinkConnections>, SendError> {
        let started = Instant::now();
        let mut pause = Duration::ZERO;
        loop {
            if !self.poller.sleep(pause).map_err(SendError::io("waiting to reconnect"))? {
                return Ok(None);
            }
            let sockets = &self.outcome.sockets;
            let last = match connector.reconnect(&self.mailbox, |number| sockets.switch_link(number)) {
                Ok(connected) => return Ok(Some(connected)),
                Err(error) => Box::new(error),
            };
            if !last.is_transient() {
                return Err(SendError::ReconnectFailed { lost, error: last });
            }
            tracing::debug!("{last}");
            pause = (pause * 2).clamp(RECONNECT_DELAY_MIN, RECONNECT_DELAY_MAX);
            if started.elapsed() + pause > self.patience {
                let waited = self.patience;
                return Err(SendError::ReconnectTimeout { lost, waited, last });
            }
        }
    }

    /// Accepts QEMU's connections until the session ends.
    fn accept(&self, listener: &UnixListener) -> Result<(), SendError> {
        // A session that was held from the beginning may end without a channel; any other waits for its first
        // channel.
        let waits_for_channel = !self.steering.hold.load(Ordering::Relaxed);
        loop {
            if self.poller.is_stopped() {
                return Ok(());
            }
            if self.steering.stop.load(Ordering::Relaxed) {
                return Err(SendError::Stopped);
            }
            if !waits_for_channel {
                self.end_if_done();
            }
            match listener.accept() {
                Ok((socket, _)) => self.open(socket)?,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.poller.wait_for_connection(listener).map_err(SendError::io("waiting for QEMU"))?
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(SendError::Io { what: "waiting for QEMU", source });
                }
            }
        }
    }

    fn open(&self, socket: UnixStream) -> Result<(), SendError> {
        let failed = SendError::io("accepting a connection of QEMU");
        return_path::set_up_socket(&socket).map_err(&failed)?;
        let socket = Arc::new(socket);
        self.outcome.add_qemu_socket(Arc::clone(&socket));
        let mut channels = lock(&self.channels);
        let number = channels.all.len() as u16;
        if number >= self.welcome.channels {
            return Err(SendError::TooManyChannels { most: self.welcome.channels });
        }
        let channel = Arc::new(SourceChannel::new(number, socket, &self.blocks));
        channels.all.push(Arc::clone(&channel));
        channels.open += 1;
        self.progress.add_channel(number);
        self.mailbox.send(&Message::new(MessageKind::Open, number, 0));
        self.poller.add(&channel).map_err(failed)
    }

    pub(super) fn channel(&self, number: u16) -> Option<Arc<SourceChannel>> {
        lock(&self.channels).all.get(usize::from(number)).map(Arc::clone)
    }

    /// Handles a message of the receiver or an error, until the control connection ends.
    fn handle_result(&self, message: Result<Message, ControlError>, return_sender: &ReturnSender) {
        let is_reason = matches!(&message, Ok(message) if message.kind == MessageKind::Failed);
        if self.outcome.has_failed() && !is_reason {
            return;
        }
        let result = message.map_err(SendError::from).and_then(|message| self.handle_message(message, return_sender));
        if let Err(error) = result {
            self.fail(error);
        }
    }

    /// Handles a message of the receiver.
    fn handle_message(&self, message: Message, return_sender: &ReturnSender) -> Result<(), SendError> {
        let unexpected = |message: &Message| SendError::UnexpectedMessage(format!("{message:?}"));
        match message.kind {
            MessageKind::Failed => return Err(SendError::Receiver(message.text())),
            MessageKind::End if self.end_sent.load(Ordering::Relaxed) => {
                self.ended.store(true, Ordering::Release);
                self.mailbox.close();
                return Ok(());
            }
            MessageKind::Received => return self.record_receipt(message.channel, message.value),
            MessageKind::Note => {
                return if self.notes.deliver(message.body) {
                    Ok(())
                } else {
                    Err(SendError::UnexpectedMessage("too many unread notes".to_owned()))
                };
            }
            _ => {}
        }
        let channel = self.channel(message.channel).ok_or_else(|| unexpected(&message))?;
        match message.kind {
            MessageKind::Delivered => self.record_delivered(&channel, message.value),
            MessageKind::Return => return_sender.enqueue(channel, ReturnEvent::Bytes(message.body)),
            MessageKind::Closed => {
                let refused = message.value != 0;
                return_sender.enqueue(channel, ReturnEvent::Closed { refused })
            }
            _ => Err(unexpected(&message)),
        }
    }

    /// Forwards the return path to the source's QEMU in order, and the closing of a channel last.
    fn forward_return_path(&self, return_receiver: &return_path::ReturnReceiver) -> Result<(), SendError> {
        while let Some((channel, event)) = return_receiver.next() {
            match event {
                ReturnEvent::Bytes(bytes) => {
                    lock(&channel.returned).push(&bytes);
                    return_receiver.write(&channel, &bytes)?;
                }
                ReturnEvent::Closed { refused } => self.close_channel(&channel, refused),
            }
        }
        Ok(())
    }

    /// Marks a channel as closed by the destination's QEMU; `refused` is true if it does not take all of its bytes.
    fn close_channel(&self, channel: &SourceChannel, refused: bool) {
        // A QEMU that is still writing must get an error, not take its bytes for sent.
        let how = if refused { Shutdown::Both } else { Shutdown::Write };
        let _ = channel.socket.shutdown(how);
        let mut reading = channel.lock_state();
        reading.closed_first |= !reading.ended;
        reading.closed = true;
        reading.refused |= refused;
        if refused && !reading.ended {
            // A channel that is paused at its limit would never be read again, so its end is reported here.
            reading.ended = true;
            self.mailbox.send(&Message::new(MessageKind::Close, channel.number, reading.offset));
        }
        self.end_if_channel_is_done(reading);
    }

    fn record_delivered(&self, channel: &SourceChannel, bytes: u64) -> Result<(), SendError> {
        let mut reading = channel.lock_state();
        let Some((more, time)) = reading.record_delivered(bytes, self.progress.link().restored_at) else {
            return Err(SendError::UnexpectedMessage(format!(
                "a report that {bytes} bytes of channel {} were delivered, of which {} were sent",
                channel.number, reading.offset
            )));
        };
        self.progress.add_delivered(more, time);
        if reading.paused && !reading.must_pause(self.welcome.window) {
            reading.paused = false;
            self.release_channel(channel, &reading)?;
        }
        self.end_if_channel_is_done(reading);
        Ok(())
    }

    /// Releases the channel to the next lane.
    pub(super) fn release_channel(&self, channel: &SourceChannel, reading: &ReadState) -> Result<(), SendError> {
        let released = if reading.left_over.is_empty() {
            self.poller.arm(channel)
        } else {
            self.poller.enqueue_left_over(channel.number)
        };
        released.map_err(SendError::io("waiting for QEMU"))
    }

    pub(super) fn end_if_channel_is_done(&self, mut reading: MutexGuard<'_, ReadState>) {
        let is_done = reading.becomes_done();
        drop(reading);
        if is_done {
            lock(&self.channels).open -= 1;
            self.end_if_done();
        }
    }

    /// Ends the session in order if all channels are closed and the session is not held.
    fn end_if_done(&self) {
        let channels = lock(&self.channels);
        if channels.open > 0
            || self.steering.hold.load(Ordering::Relaxed)
            || self.end_sent.swap(true, Ordering::Relaxed)
        {
            return;
        }
        let all = channels.all.clone();
        drop(channels);
        match all.iter().find_map(|channel| channel.abort_reason()) {
            Some(why) => self.fail(SendError::MigrationAborted(why)),
            None => self.mailbox.send(&Message::new(MessageKind::End, 0, 0)),
        }
    }
}

/// Returns the error for a count of frames of a lane that the receiver cannot have.
fn invalid_count(lane: u16, count: u64) -> impl Fn((u64, u64)) -> SendError {
    move |(least, most)| SendError::InvalidCount { lane, count, least, most }
}

/// Creates a selector of the methods that both sides run fast.
fn selector(welcome: &Welcome, codecs: &[Codecs]) -> Selector {
    let is_decoded = |method: Method| welcome.methods & 1 << method.number() != 0;
    let encodings = codecs.first().map(|codecs| codecs.usable_encodings(is_decoded));
    let sender = SenderProfile::with_unknown_link(codecs.len());
    Selector::new(&encodings.unwrap_or_default(), sender, REGIONS_MAX)
}
