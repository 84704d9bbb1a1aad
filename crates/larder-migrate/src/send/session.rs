//! Session with a receiver, over successive links.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::{self, Scope};
use std::time::{Duration, Instant};

use larder_codec::batch::Method;
use larder_codec::select::{REGIONS_MAX, Selector, Sender};

use super::channel::{Channel, Reading};
use super::dial::{Connected, Dial};
use super::out::Out;
use super::poller::Poller;
use super::returns::{self, Back, Returns};
use super::{SendError, Steering, lock};
use crate::base::{Frontier, Slots};
use crate::control::{Control, ControlError, LAST_WORDS, Mailbox};
use crate::decode::Bases;
use crate::encode::{Codecs, Order};
use crate::limits::InForce;
use crate::link::Link;
use crate::notes::Notes;
use crate::pace::Pace;
use crate::progress::Progress;
use crate::session::{Ending, Side};
use crate::stream::Blocks;
use crate::wire::{Kind, Message, Welcome};

/// Pause between two reconnection attempts: the first, and the maximum.
const TRY_FIRST_AFTER: Duration = Duration::from_millis(50);
const TRY_EVERY: Duration = Duration::from_secs(1);

pub(super) struct Session<'a> {
    pub(super) poller: Poller,
    pub(super) mailbox: Arc<Mailbox>,
    notes: Notes,
    channels: Mutex<Channels>,
    blocks: Blocks,
    pub(super) order: Order,
    /// Outputs of the lanes.
    pub(super) outs: Vec<Out>,
    pub(super) welcome: Welcome,
    pub(super) limits: Arc<InForce>,
    pub(super) link_pace: Pace,
    /// Limiter of the lanes' CPU time.
    pub(super) cpu_pace: Pace,
    /// Time for which a lost link is reconnected.
    pub(super) patience: Duration,
    pub(super) progress: &'a Progress,
    steering: &'a Steering,
    end_sent: AtomicBool,
    /// Set once the receiver has sent END too.
    ended: AtomicBool,
    pub(super) ending: Ending<SendError>,
}

#[derive(Default)]
struct Channels {
    /// All channels, by number.
    all: Vec<Arc<Channel>>,
    /// Number of channels that are not closed by both QEMUs.
    open: usize,
}

impl Side for Session<'_> {
    type Error = SendError;
    const THREAD: &'static str = "larder-send";

    fn ending(&self) -> &Ending<SendError> {
        &self.ending
    }

    fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    fn ended(&self) -> &AtomicBool {
        &self.ended
    }

    fn go_home(&self) {
        self.order.bases.frontier.stop();
        self.poller.stop();
        self.outs.iter().for_each(Out::stop);
    }
}

impl<'a> Session<'a> {
    pub(super) fn new(
        mailbox: Arc<Mailbox>,
        notes: Notes,
        welcome: Welcome,
        dial: &Dial,
        limits: Arc<InForce>,
        codecs: &[Codecs],
        (progress, steering): (&'a Progress, &'a Steering),
    ) -> Result<Self, SendError> {
        let bases = Bases {
            slots: Slots::new(welcome.delta_memory),
            frontier: Frontier::new(),
        };
        Ok(Self {
            poller: Poller::new().map_err(SendError::io("setting up epoll"))?,
            mailbox,
            notes,
            channels: Mutex::default(),
            blocks: Blocks::new(),
            order: Order::new(bases, selector(&welcome, codecs)),
            outs: codecs.iter().map(|_| Out::default()).collect(),
            welcome,
            limits,
            link_pace: Pace::new(),
            cpu_pace: Pace::new(),
            patience: dial.patience(),
            progress,
            steering,
            end_sent: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            ending: Ending::new(),
        })
    }

    pub(super) fn run(
        self,
        dial: Dial,
        connected: Connected,
        codecs: Vec<Codecs>,
        listener: &UnixListener,
    ) -> Result<(), SendError> {
        listener
            .set_nonblocking(true)
            .map_err(SendError::io("the socket for QEMU"))?;
        thread::scope(|scope| {
            let session = &self;
            let (returns, returning) = Returns::new();
            session.spawn(scope, "the return path", move || session.bring_back(&returning));
            session.spawn(scope, "the control connection", move || {
                let result = session.over_links(scope, dial, connected, &returns);
                session.mailbox.end();
                if result.is_ok() {
                    session.go_home();
                }
                result
            });
            let (running, all_ended) = mpsc::channel::<()>();
            for (out, codecs) in session.outs.iter().zip(codecs) {
                let running = running.clone();
                session.spawn(scope, "a lane", move || {
                    let _until_it_ends = running;
                    session.lane(out, codecs)
                });
            }
            drop(running);
            session.part("accepting QEMU's connections", || session.accept(listener));
            session.notes.end();
            // The session is over; lanes that are not blocked send their orderly end to the receiver.
            let _ = all_ended.recv_timeout(LAST_WORDS);
            session.ending.shut();
        });
        self.ending.into_error().map_or(Ok(()), Err)
    }

    /// Exchanges messages with the receiver, over successive links, until the session ends.
    fn over_links<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        mut dial: Dial,
        mut connected: Connected,
        returns: &Returns,
    ) -> Result<(), SendError> {
        loop {
            let number = connected.number;
            for (lane, (link, received)) in (0..).zip(connected.lanes) {
                self.go_on_over(scope, lane, number, link, received);
            }
            let control = connected.control;
            let handle = control.handle().map_err(SendError::io("the control connection"))?;
            self.ending.sockets.add(number, handle, true);
            let control = Control::new(control, number, &self.mailbox, !self.patience.is_zero())
                .map_err(SendError::io("the control connection"))?;
            let lost = match control.exchange(|message| self.take(message, returns)) {
                Ok(()) => return Ok(()),
                Err(error) if self.patience.is_zero() || !error.is_symptom() => return Err(error.into()),
                Err(error) => error,
            };
            self.ending.sockets.cut(number);
            self.progress.link_lost();
            // After a failure the session closes the connection itself, and is only trying to send the reason.
            if !self.ending.has_failed() {
                tracing::warn!("link lost ({lost}); reconnecting");
            }
            match self.connect_again(&mut dial, lost)? {
                Some(again) => connected = again,
                None => return Ok(()),
            }
            if let Err(error) = self.mailbox.resume(connected.received) {
                // The new link can carry the reason to the receiver.
                self.fail(error.into());
            }
            let away = self.progress.link_back();
            tracing::info!("the link was restored after {:.1} s", away.as_secs_f64());
        }
    }

    /// Resumes a lane over this link: sends the frames after the first `received`, which the receiver lacks.
    fn go_on_over<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        lane: u16,
        number: u32,
        link: Link,
        received: u64,
    ) {
        let Some(out) = self.outs.get(usize::from(lane)) else {
            return;
        };
        let added = link
            .handle()
            .map(|handle| self.ending.sockets.add(number, handle, false))
            .map_err(SendError::io("a lane"));
        let resumed = || out.resume(received).map_err(of_lane(lane, received));
        if let Err(error) = added.and_then(|()| resumed()) {
            return self.fail(error);
        }
        // Repeating may take long, and the control connection must be read meanwhile.
        self.spawn(scope, "resending frames", move || {
            if let Err(error) = out.go_on_over(link, number, received) {
                tracing::debug!("lane {lane}: {error}");
                self.mailbox.lane_lost(number);
            }
            Ok(())
        });
    }

    /// Records that the receiver has `count` frames of a lane.
    fn receipt(&self, lane: u16, count: u64) -> Result<(), SendError> {
        let confirmed = match self.outs.get(usize::from(lane)) {
            Some(out) => out.confirm(count),
            None => Err((0, 0)),
        };
        confirmed.map_err(of_lane(lane, count))
    }

    /// Tries to reconnect until the patience is exhausted; returns `None` if the session is over.
    fn connect_again(&self, dial: &mut Dial, lost: ControlError) -> Result<Option<Connected>, SendError> {
        let begun = Instant::now();
        let mut pause = Duration::ZERO;
        loop {
            if !self
                .poller
                .sleep(pause)
                .map_err(SendError::io("waiting to reconnect"))?
            {
                return Ok(None);
            }
            let sockets = &self.ending.sockets;
            let last = match dial.again(&self.mailbox, |number| sockets.turn(number)) {
                Ok(connected) => return Ok(Some(connected)),
                Err(error) => Box::new(error),
            };
            if !last.is_passing() {
                return Err(SendError::NotAgain { lost, error: last });
            }
            tracing::debug!("{last}");
            pause = (pause * 2).clamp(TRY_FIRST_AFTER, TRY_EVERY);
            if begun.elapsed() + pause > self.patience {
                let waited = self.patience;
                return Err(SendError::Away { lost, waited, last });
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
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self
                    .poller
                    .wait_for(listener)
                    .map_err(SendError::io("waiting for QEMU"))?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(SendError::Io {
                        what: "waiting for QEMU",
                        source,
                    });
                }
            }
        }
    }

    fn open(&self, socket: UnixStream) -> Result<(), SendError> {
        let failed = SendError::io("accepting a connection of QEMU");
        returns::set_up(&socket).map_err(&failed)?;
        let socket = Arc::new(socket);
        self.ending.shut_later(Arc::clone(&socket));
        let mut channels = lock(&self.channels);
        let number = channels.all.len() as u16;
        if number >= self.welcome.channels {
            return Err(SendError::Channels {
                most: self.welcome.channels,
            });
        }
        let channel = Arc::new(Channel::new(number, socket, &self.blocks));
        channels.all.push(Arc::clone(&channel));
        channels.open += 1;
        self.progress.channel_opened(number);
        self.mailbox.send(&Message::new(Kind::Open, number, 0));
        self.poller.add(&channel).map_err(failed)
    }

    pub(super) fn channel(&self, number: u16) -> Option<Arc<Channel>> {
        lock(&self.channels).all.get(usize::from(number)).map(Arc::clone)
    }

    /// Handles a message of the receiver or an error, until the control connection ends.
    fn take(&self, message: Result<Message, ControlError>, returns: &Returns) {
        let is_reason = matches!(&message, Ok(message) if message.kind == Kind::Failed);
        if self.ending.has_failed() && !is_reason {
            return;
        }
        let heard = message
            .map_err(SendError::from)
            .and_then(|message| self.hear(message, returns));
        if let Err(error) = heard {
            self.fail(error);
        }
    }

    /// Handles a message of the receiver.
    fn hear(&self, message: Message, returns: &Returns) -> Result<(), SendError> {
        let unexpected = |message: &Message| SendError::Message(format!("{message:?}"));
        match message.kind {
            Kind::Failed => return Err(SendError::Receiver(message.text())),
            Kind::End if self.end_sent.load(Ordering::Relaxed) => {
                self.ended.store(true, Ordering::Release);
                self.mailbox.close();
                return Ok(());
            }
            Kind::Received => return self.receipt(message.channel, message.value),
            Kind::Note => {
                return if self.notes.deliver(message.body) {
                    Ok(())
                } else {
                    Err(SendError::Message("too many unread notes".to_owned()))
                };
            }
            _ => {}
        }
        let channel = self.channel(message.channel).ok_or_else(|| unexpected(&message))?;
        match message.kind {
            Kind::Delivered => self.delivered(&channel, message.value),
            Kind::Return => returns.put(channel, Back::Bytes(message.body)),
            Kind::Closed => {
                let refused = message.value != 0;
                returns.put(channel, Back::Closed { refused })
            }
            _ => Err(unexpected(&message)),
        }
    }

    /// Forwards the return path to the source's QEMU in order, and the closing of a channel last.
    fn bring_back(&self, returning: &returns::Returning) -> Result<(), SendError> {
        while let Some((channel, back)) = returning.next() {
            match back {
                Back::Bytes(bytes) => {
                    lock(&channel.returned).take(&bytes);
                    returning.write(&channel, &bytes)?;
                }
                Back::Closed { refused } => self.closed(&channel, refused),
            }
        }
        Ok(())
    }

    /// Marks a channel as closed by the destination's QEMU; `refused` is true if it does not take all of its bytes.
    fn closed(&self, channel: &Channel, refused: bool) {
        // A QEMU that is still writing must get an error, not take its bytes for sent.
        let how = if refused { Shutdown::Both } else { Shutdown::Write };
        let _ = channel.socket.shutdown(how);
        let mut reading = channel.reading();
        reading.closed_first |= !reading.ended;
        reading.closed = true;
        reading.refused |= refused;
        if refused && !reading.ended {
            // A channel that is paused at its limit would never be read again, so its end is reported here.
            reading.ended = true;
            self.mailbox
                .send(&Message::new(Kind::Close, channel.number, reading.offset));
        }
        self.end_if_channel_is_done(reading);
    }

    fn delivered(&self, channel: &Channel, bytes: u64) -> Result<(), SendError> {
        let mut reading = channel.reading();
        let Some((more, time)) = reading.delivered(bytes, self.progress.link().back) else {
            return Err(SendError::Message(format!(
                "a report that {bytes} bytes of channel {} were delivered, of which {} were sent",
                channel.number, reading.offset
            )));
        };
        self.progress.delivered(more, time);
        if reading.paused && !reading.must_pause(self.welcome.window) {
            reading.paused = false;
            self.again(channel, &reading)?;
        }
        self.end_if_channel_is_done(reading);
        Ok(())
    }

    /// Releases the channel to the next lane.
    pub(super) fn again(&self, channel: &Channel, reading: &Reading) -> Result<(), SendError> {
        let again = if reading.left_over.is_empty() {
            self.poller.arm(channel)
        } else {
            self.poller.has_left_over(channel.number)
        };
        again.map_err(SendError::io("waiting for QEMU"))
    }

    pub(super) fn end_if_channel_is_done(&self, mut reading: MutexGuard<'_, Reading>) {
        let is_done = reading.is_done_now();
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
        match all.iter().find_map(|channel| channel.broke_off()) {
            Some(why) => self.fail(SendError::BrokenOff(why)),
            None => self.mailbox.send(&Message::new(Kind::End, 0, 0)),
        }
    }
}

/// Returns the error for a count of frames of a lane that the receiver cannot have.
fn of_lane(lane: u16, count: u64) -> impl Fn((u64, u64)) -> SendError {
    move |(least, most)| SendError::Received {
        lane,
        count,
        least,
        most,
    }
}

/// Creates a selector of the methods that both sides run fast.
fn selector(welcome: &Welcome, codecs: &[Codecs]) -> Selector {
    let is_decoded = |method: Method| welcome.methods & 1 << method.number() != 0;
    let ways = codecs.first().map(|codecs| codecs.ways(is_decoded));
    let sender = Sender::of_unknown_link(codecs.len());
    Selector::new(&ways.unwrap_or_default(), sender, REGIONS_MAX)
}
