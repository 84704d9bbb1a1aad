//! Requests in flight, over NBD and vhost-user-blk at once.

use super::fault::Fault;
use super::guest::{Guest, Place};
use super::live::RunningServer;
use super::model::{Before, Change, Effect, Model};
use super::nbd::{self, Reply};
use super::steps::{Kind, Request};

/// Identifier of an answer, in its protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Name {
    Cookie(u64),
    Id(u16, Place),
}

struct Pending {
    request: Request,
    name: Name,
}

/// An answer.
enum Answer {
    Nbd(Reply),
    Guest(Vec<u8>),
}

/// All requests in flight.
#[derive(Default)]
pub(super) struct Flight {
    pending: Vec<Pending>,
    /// Changes that a kill interrupted. They count as concurrent with those that the guest's next server answers.
    interrupted: Vec<Change>,
}

/// Returns the bytes of the write with this number.
fn pattern(number: u64, len: usize) -> Vec<u8> {
    let mut word = number | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        word = word.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(number | 1);
        bytes.extend((word >> 3).to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

impl Request {
    /// Returns the request's effect on its range, if it has one.
    pub(super) fn effect(&self) -> Option<Effect> {
        let len = (self.range.end - self.range.start) as usize;
        match self.kind {
            Kind::Write(number) => Some(Effect::Bytes(pattern(number, len))),
            Kind::Fill(byte) => Some(Effect::Bytes(vec![byte; len])),
            Kind::Zeroes { .. } => Some(Effect::Zeroes),
            Kind::Discard => Some(Effect::Discard),
            Kind::Read | Kind::Flush | Kind::Status { .. } => None,
        }
    }

    fn change(&self, is_acknowledged: bool) -> Option<Change> {
        Some(Change { range: self.range.clone(), effect: self.effect()?, is_acknowledged, fua: self.fua })
    }

    fn is_sector_aligned(&self) -> bool {
        self.range.start.is_multiple_of(512) && self.range.end.is_multiple_of(512)
    }
}

impl Flight {
    pub(super) fn len(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Returns whether requests of a guest wait for the next server.
    pub(super) fn has_guest_requests(&self) -> bool {
        self.pending.iter().any(|pending| matches!(pending.name, Name::Id(..)))
    }

    /// Returns whether a request must wait: the model has no order of changes within a sector.
    pub(super) fn conflicts(&self, request: &Request) -> bool {
        let sectors = |request: &Request| request.range.start / 512..request.range.end.div_ceil(512);
        let sectors_of_request = sectors(request);
        self.pending.iter().any(|pending| {
            let other = sectors(&pending.request);
            let is_aligned = request.is_sector_aligned() && pending.request.is_sector_aligned();
            let both_change = request.changes() && pending.request.changes();
            both_change && !is_aligned && sectors_of_request.start < other.end && other.start < sectors_of_request.end
        })
    }

    /// Sends a request.
    pub(super) fn send(&mut self, live: &mut RunningServer, request: &Request) -> Result<(), Fault> {
        let name = match request.nbd {
            true => {
                let sent = send_nbd(live.nbd()?, request);
                Name::Cookie(sent.map_err(|error| live.died("sending over NBD", &error.to_string()))?)
            }
            false => send_guest(live.guest()?, request),
        };
        self.pending.push(Pending { request: request.clone(), name });
        Ok(())
    }

    /// Waits for all answers, and checks them.
    pub(super) fn settle(&mut self, live: &mut RunningServer, model: &mut Model) -> Result<(), Fault> {
        if self.pending.is_empty() {
            self.interrupted.clear();
            return Ok(());
        }
        let answers = self.collect(live)?;
        let pending = std::mem::take(&mut self.pending);
        if pending.iter().any(|pending| pending.request.kind == Kind::Flush) {
            // The flush was sent after all requests before this batch had been answered.
            model.flushed();
        }
        let mut changes = std::mem::take(&mut self.interrupted);
        changes.extend(pending.iter().filter_map(|pending| pending.request.change(true)));
        let before = model.change(&changes);
        for (pending, answer) in pending.iter().zip(&answers) {
            compare(&pending.request, answer, model, &before)?;
        }
        Ok(())
    }

    /// Returns the answers, in the order of the requests.
    fn collect(&mut self, live: &mut RunningServer) -> Result<Vec<Answer>, Fault> {
        let mut answers: Vec<Option<Answer>> = self.pending.iter().map(|_| None).collect();
        let over_nbd = self.pending.iter().filter(|pending| pending.request.nbd).count();
        for _ in 0..over_nbd {
            let received = live.nbd()?.receive();
            let reply = received.map_err(|error| live.died("waiting for a reply over NBD", &error.to_string()))?;
            let index = self.index(&Name::Cookie(reply.cookie));
            let index = index.ok_or_else(|| Fault::new("protocol", "a reply over NBD to an unknown request"))?;
            let request = &self.pending[index].request;
            if reply.error != 0 {
                let what = format!("{request:?} failed over NBD with error {}: {}", reply.error, reply.message);
                return Err(Fault::new("failed request", what));
            }
            answers[index] = Some(Answer::Nbd(reply));
        }
        for _ in 0..self.pending.len() - over_nbd {
            let completed = live.guest()?.complete();
            let done = completed
                .map_err(|error| live.died("waiting for a completion over vhost-user-blk", &format!("{error:#}")))?;
            let matches_id = |pending: &Pending| matches!(&pending.name, Name::Id(id, _) if *id == done.id);
            let index = self.pending.iter().position(matches_id);
            let index = index
                .ok_or_else(|| Fault::new("protocol", "a completion over vhost-user-blk of an unknown request"))?;
            let pending = &self.pending[index];
            if done.status != 0 {
                let what = format!("{:?} failed over vhost-user-blk with status {}", pending.request, done.status);
                return Err(Fault::new("failed request", what));
            }
            let data = match &pending.name {
                Name::Id(_, buffers) => live.guest()?.data(buffers),
                Name::Cookie(_) => Vec::new(),
            };
            answers[index] = Some(Answer::Guest(data));
        }
        if let Some(guest) = &mut live.guest {
            guest.is_idle();
        }
        Ok(answers.into_iter().flatten().collect())
    }

    fn index(&self, name: &Name) -> Option<usize> {
        self.pending.iter().position(|pending| &pending.name == name)
    }

    /// Records the death of the server: any request in flight may have been carried out or not. The next server
    /// answers the guest's requests.
    pub(super) fn interrupt(&mut self, model: &mut Model) {
        let changes: Vec<Change> = self.pending.iter().filter_map(|pending| pending.request.change(false)).collect();
        model.change(&changes);
        self.pending.retain(|pending| matches!(pending.name, Name::Id(..)));
        if !self.pending.is_empty() {
            self.interrupted = changes;
        }
    }
}

fn send_nbd(client: &mut nbd::Client, request: &Request) -> std::io::Result<u64> {
    let fua = if request.fua { nbd::FUA } else { 0 };
    let range = &request.range;
    match request.kind {
        Kind::Write(_) | Kind::Fill(_) => {
            let Some(Effect::Bytes(bytes)) = request.effect() else { unreachable!("a write has bytes") };
            client.send(nbd::WRITE, fua, range, &bytes)
        }
        Kind::Zeroes { unmap: true } => client.send(nbd::WRITE_ZEROES, fua, range, &[]),
        Kind::Zeroes { unmap: false } => client.send(nbd::WRITE_ZEROES, fua | nbd::NO_HOLE, range, &[]),
        Kind::Discard => client.send(nbd::TRIM, fua, range, &[]),
        Kind::Read => client.send(nbd::READ, 0, range, &[]),
        Kind::Flush => client.send(nbd::FLUSH, 0, range, &[]),
        Kind::Status { one } => client.send(nbd::BLOCK_STATUS, if one { nbd::REQ_ONE } else { 0 }, range, &[]),
    }
}

fn send_guest(guest: &mut Guest, request: &Request) -> Name {
    let range = &request.range;
    match request.kind {
        Kind::Write(_) | Kind::Fill(_) => {
            let Some(Effect::Bytes(bytes)) = request.effect() else { unreachable!("a write has bytes") };
            Name::Id(guest.write(range, &bytes), Place::new())
        }
        Kind::Zeroes { unmap } => Name::Id(guest.write_zeroes(range, unmap), Place::new()),
        Kind::Discard => Name::Id(guest.discard(range), Place::new()),
        Kind::Read | Kind::Status { .. } => {
            let (id, place) = guest.read(range);
            Name::Id(id, place)
        }
        Kind::Flush => Name::Id(guest.flush(), Place::new()),
    }
}

/// Checks an answer against the model.
fn compare(request: &Request, answer: &Answer, model: &mut Model, before: &Before) -> Result<(), Fault> {
    let range = &request.range;
    let content_failure = |what: String| Fault::new("content", format!("{:?} of {range:#x?}: {what}", request.kind));
    match (&request.kind, answer) {
        (Kind::Read, Answer::Nbd(reply)) => {
            let data = reply.data(range).map_err(|what| Fault::new("protocol", what))?;
            model.read(range.start, &data, before).map_err(content_failure)
        }
        (Kind::Read, Answer::Guest(data)) => model.read(range.start, data, before).map_err(content_failure),
        (Kind::Status { one }, Answer::Nbd(reply)) => {
            let zeros = reply.zeros(range, *one);
            for zeros in zeros.map_err(|what| Fault::new("status", format!("of {range:#x?}: {what}")))? {
                if let Err(at) = model.may_be_zero(zeros.clone(), before) {
                    let what = format!("{zeros:#x?} is reported as zeros, but the sector at {at:#x} is not zero");
                    return Err(Fault::new("status", what));
                }
            }
            Ok(())
        }
        _ => Ok(()),
    }
}
