//! A front-end's connection outlives the server's process: it is kept by whoever starts the server again, and the next
//! process goes on with it. The front-end sees a pause.
//!
//! The service manager keeps descriptors for a service (systemd's `FDSTORE=1`, sd_notify(3)), and hands them to its next
//! process. They are: the connection; the descriptors that came with what the front-end has said and would not say again
//! ([`Record`]); and the ledger, a file in memory with those messages themselves.
//!
//! ```text
//! ledger  0        8               4096        4096 + 1 MiB
//!         +--------+---------------+-----------+-----------+
//!         | magic  | state | which | text 0    | text 1    |
//!         +--------+---------------+-----------+-----------+
//!         state: 1 byte; which text: 1 byte; 6 bytes of 0
//!
//! text    0        8
//!         +--------+-------------------------------------+
//!         | bytes  | messages of so many bytes           |     little-endian
//!         +--------+-------------------------------------+
//!
//! message 0       4             8
//!         +-------+-------------+---------------------+--------------------+
//!         | bytes | descriptors | a number u64 each   | header and payload |
//!         +-------+-------------+---------------------+--------------------+
//! ```
//!
//! A descriptor is kept as `larder/DISK/NUMBER`, the ledger as `larder/DISK/ledger`, the connection as
//! `larder/DISK/connection`. What is open once has one number however often it is sent, as guest memory in two regions is:
//! systemd keeps such a file once.
//!
//! A new text is written where the old one is not, after its descriptors were put away; state and which are one store of
//! eight bytes. So a process that is killed leaves one of three things:
//!
//! | state | the next process |
//! | --- | --- |
//! | 0: between two messages | goes on; requests are in the region of requests in flight, without which it cannot |
//! | 1: a message was read, and perhaps not answered | closes the connection: the front-end has to connect again |
//! | 2: stopped, all requests done | goes on where the text says |

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use larder_block::Loop;
use larder_block::event_loop::Socket;
use rustix::fs::{MemfdFlags, memfd_create};

use super::message::{HEADER_BYTES, PAYLOAD_BYTES_MAX, TABLE_REGIONS_MAX, number};
use super::record::{Message, Record};

const MAGIC: [u8; 8] = *b"LARDERt1";

const STATE_AT: u64 = 8;

/// Where the two texts begin.
const TEXTS_AT: [u64; 2] = [4096, 4096 + TEXT_BYTES_MAX];

/// A disk of 64 queues and 509 regions of memory takes some 80 KiB.
const TEXT_BYTES_MAX: u64 = 1 << 20;

const MESSAGE_HEAD_BYTES: usize = 8;

/// How long the service manager may take to take a descriptor. It reads nothing while it reloads its units.
const PATIENCE: Duration = Duration::from_secs(5);

/// One disk's part of what the service manager keeps.
pub struct Store {
    on: Loop,
    manager: Socket,
    disk: String,
    /// It has not listened once.
    is_deaf: Cell<bool>,
}

/// What a process before this one has left of a disk's connection.
#[derive(Debug, Default)]
pub struct Left {
    /// By what follows `larder/DISK/` in their names.
    files: HashMap<String, OwnedFd>,
}

/// Why a connection cannot be gone on with.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TakeoverError {
    #[error("the process before this one ended while it answered a message")]
    InHand,
    #[error("requests were under way, and the front-end keeps no notes of them (INFLIGHT_SHMFD)")]
    NoNotes,
    #[error("the service manager has not kept {0}; FileDescriptorStoreMax= may be too low")]
    Missing(String),
    #[error("what was written of it makes no sense")]
    Ledger,
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// The name of a descriptor that is kept for a disk: the disk, and what it is.
pub fn parse_name(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("larder/")?.split_once('/')
}

impl Left {
    /// Adds one of its descriptors; `what` is as [`parse_name`] gives it.
    pub fn add(&mut self, what: &str, file: OwnedFd) {
        self.files.insert(what.to_owned(), file);
    }

    /// The names of all.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.keys().map(String::as_str)
    }

    fn take(&mut self, what: &str) -> Result<OwnedFd, TakeoverError> {
        let missing = || TakeoverError::Missing(what.to_owned());
        self.files.remove(what).ok_or_else(missing)
    }
}

impl Store {
    /// What `manager`, a socket that is connected to `$NOTIFY_SOCKET`, keeps for the disk of this name.
    ///
    /// # Errors
    /// The loop is simulated.
    pub fn new(on: &Loop, manager: OwnedFd, disk: &str) -> io::Result<Self> {
        Ok(Self {
            on: on.clone(),
            manager: Socket::from_descriptor(on, manager)?,
            disk: disk.to_owned(),
            is_deaf: Cell::new(false),
        })
    }

    async fn put(&self, what: &str, file: BorrowedFd<'_>) -> io::Result<()> {
        let text = format!("FDSTORE=1\nFDNAME=larder/{}/{what}", self.disk);
        self.tell(&text, &[file]).await
    }

    async fn remove(&self, what: &str) -> io::Result<()> {
        self.tell(&format!("FDSTOREREMOVE=1\nFDNAME=larder/{}/{what}", self.disk), &[])
            .await
    }

    async fn tell(&self, text: &str, files: &[BorrowedFd<'_>]) -> io::Result<()> {
        let told = self.manager.write_with_descriptors(text.as_bytes(), files);
        let told = match self.is_deaf.get() {
            true => None,
            false => self.on.timeout(PATIENCE, told).await,
        };
        self.is_deaf.set(told.is_none());
        told.unwrap_or_else(|| {
            let error = "the service manager ($NOTIFY_SOCKET) does not listen";
            Err(io::Error::new(io::ErrorKind::TimedOut, error))
        })
    }

    /// Has all of it let go.
    pub(super) async fn forget(&self, left: Left) {
        for what in left.names() {
            // One that cannot be told ends with the service.
            let _ = self.remove(what).await;
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle = 0,
    InHand = 1,
    Stopped = 2,
}

/// A connection that is kept.
pub(super) struct Kept<'a> {
    store: &'a Store,
    ledger: File,
    which: usize,
    record: Record,
    /// The last number that was given to a descriptor.
    last_number: u64,
}

impl<'a> Kept<'a> {
    /// Puts a new connection away.
    pub(super) async fn begin(store: &'a Store, connection: BorrowedFd<'_>) -> io::Result<Self> {
        let ledger = memfd_create("larder-connection", MemfdFlags::CLOEXEC)?;
        let this = Self {
            store,
            ledger: ledger.into(),
            which: 0,
            record: Record::default(),
            last_number: 0,
        };
        this.ledger.write_all_at(&MAGIC, 0)?;
        this.write_text(0)?;
        store.put("connection", connection).await?;
        store.put("ledger", this.ledger.as_fd()).await?;
        Ok(this)
    }

    /// A message is about to be read.
    pub(super) fn take_in_hand(&self) -> io::Result<()> {
        self.set(State::InHand)
    }

    /// What the front-end has said, and is about to be answered.
    pub(super) async fn note(&mut self, mut message: Message, reply: Option<&Message>) -> io::Result<()> {
        let before = self.files();
        let mut files = Vec::new();
        let mut known: Vec<(u64, BorrowedFd<'_>)> = described(self.record.messages()).collect();
        for file in message.descriptors() {
            let same = known.iter().find(|(_, other)| is_same(*other, file.as_fd()));
            let number = same.map(|(number, _)| *number);
            let number = number.unwrap_or_else(|| {
                self.last_number += 1;
                self.last_number
            });
            known.push((number, file.as_fd()));
            files.push(number);
        }
        drop(known);
        message.files = files;
        self.record.note(message, reply);
        let after = self.files();
        for number in after.difference(&before) {
            let mut all = described(self.record.messages());
            if let Some((_, file)) = all.find(|(other, _)| other == number) {
                self.store.put(&number.to_string(), file).await?;
            }
        }
        self.turn_page(State::InHand)?;
        for number in before.difference(&after) {
            self.store.remove(&number.to_string()).await?;
        }
        Ok(())
    }

    /// It was answered.
    pub(super) fn answered(&self) -> io::Result<()> {
        self.set(State::Idle)
    }

    /// What was said, for this process.
    pub(super) fn messages(&self) -> &[Message] {
        self.record.messages()
    }

    /// A ring has stopped there, for this process only.
    pub(super) fn rests_at(&mut self, ring: u32, base: u32) {
        self.record.rests_at(ring, base);
    }

    /// All requests are done, and the connection is the next process'.
    pub(super) fn leave(mut self) -> io::Result<()> {
        self.turn_page(State::Stopped)
    }

    /// The connection has ended.
    pub(super) async fn forget(self) {
        let names = self.files().into_iter().map(|number| number.to_string());
        for name in names.chain(["connection", "ledger"].map(str::to_owned)) {
            // One that cannot be told ends with the service.
            let _ = self.store.remove(&name).await;
        }
    }

    /// The numbers of all descriptors that came with what was said.
    fn files(&self) -> BTreeSet<u64> {
        described(self.record.messages()).map(|(number, _)| number).collect()
    }

    /// Writes down what the record says now.
    fn turn_page(&mut self, state: State) -> io::Result<()> {
        let other = 1 - self.which;
        self.write_text(other)?;
        self.which = other;
        self.set(state)
    }

    fn write_text(&self, which: usize) -> io::Result<()> {
        let mut text = vec![0; 8];
        for message in self.record.messages() {
            for count in [message.bytes().len(), message.files.len()] {
                text.extend((count as u32).to_le_bytes());
            }
            message
                .files
                .iter()
                .for_each(|number| text.extend(number.to_le_bytes()));
            text.extend(message.bytes());
        }
        if text.len() as u64 > TEXT_BYTES_MAX {
            return Err(io::Error::other(format!("{} bytes to be noted", text.len())));
        }
        let bytes = text.len() as u64 - 8;
        text[..8].copy_from_slice(&bytes.to_le_bytes());
        self.ledger.write_all_at(&text, TEXTS_AT[which])
    }

    /// Eight bytes of a page: a kill comes before or after them.
    fn set(&self, state: State) -> io::Result<()> {
        let mut word = [0; 8];
        word[0] = state as u8;
        word[1] = self.which as u8;
        self.ledger.write_all_at(&word, STATE_AT)
    }
}

impl Left {
    /// Goes on with the connection, which comes along. What is not of it any more is let go.
    pub(super) async fn take_up(mut self, store: &Store) -> Result<(Kept<'_>, OwnedFd), TakeoverError> {
        let taken = self.take_all();
        let (ledger, which, messages, connection) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                store.forget(self).await;
                return Err(error);
            }
        };
        store.forget(self).await;
        let kept = Kept {
            store,
            ledger,
            which,
            last_number: described(&messages).map(|(number, _)| number).max().unwrap_or(0),
            record: Record::from_messages(messages),
        };
        // Requests may be under way from now on.
        kept.set(State::Idle)?;
        Ok((kept, connection))
    }

    fn take_all(&mut self) -> Result<(File, usize, Vec<Message>, OwnedFd), TakeoverError> {
        let ledger = File::from(self.take("ledger")?);
        let (state, which) = read_state(&ledger)?;
        let mut messages = Vec::new();
        for (bytes, files) in read_text(&ledger, which)? {
            let descriptors = files.iter().map(|number| self.copy(*number));
            let mut message = Message::new(bytes, descriptors.collect::<Result<_, _>>()?);
            message.files = files;
            messages.push(message);
        }
        let says = |request| messages.iter().any(|said: &Message| said.request() == request);
        match state {
            State::InHand => return Err(TakeoverError::InHand),
            State::Idle if says(number::SET_VRING_KICK) && !says(number::SET_INFLIGHT_FD) => {
                return Err(TakeoverError::NoNotes);
            }
            State::Idle | State::Stopped => {}
        }
        let connection = self.take("connection")?;
        for (number, _) in described(&messages) {
            self.files.remove(&number.to_string());
        }
        Ok((ledger, which, messages, connection))
    }

    fn copy(&self, number: u64) -> Result<OwnedFd, TakeoverError> {
        let name = number.to_string();
        match self.files.get(&name) {
            Some(file) => Ok(file.try_clone()?),
            None => Err(TakeoverError::Missing(name)),
        }
    }
}

/// The descriptors that came with messages, and their numbers.
fn described(messages: &[Message]) -> impl Iterator<Item = (u64, BorrowedFd<'_>)> {
    messages.iter().flat_map(|said| {
        let files = said.files.iter().copied();
        files.zip(said.descriptors().iter().map(AsFd::as_fd))
    })
}

/// Whether both are of one open file. Unknown (no KCMP in the kernel) is no.
fn is_same(one: BorrowedFd<'_>, other: BorrowedFd<'_>) -> bool {
    /// `KCMP_FILE` of linux/kcmp.h.
    const FILE: libc::c_long = 0;
    let ours = rustix::process::getpid().as_raw_nonzero().get();
    let files = [one, other].map(|file| file.as_raw_fd());
    // SAFETY: only numbers are passed, and nothing is written.
    unsafe { libc::syscall(libc::SYS_kcmp, ours, ours, FILE, files[0], files[1]) == 0 }
}

fn read_state(ledger: &File) -> Result<(State, usize), TakeoverError> {
    let mut head = [0; 16];
    ledger.read_exact_at(&mut head, 0)?;
    let state = [State::Idle, State::InHand, State::Stopped];
    let state = state.into_iter().find(|state| *state as u8 == head[8]);
    match state {
        Some(state) if head[..8] == MAGIC && head[9] <= 1 => Ok((state, usize::from(head[9]))),
        _ => Err(TakeoverError::Ledger),
    }
}

/// A message, and the numbers of the descriptors that it came with.
type Said = (Vec<u8>, Vec<u64>);

fn read_text(ledger: &File, which: usize) -> Result<Vec<Said>, TakeoverError> {
    let mut bytes = [0; 8];
    ledger.read_exact_at(&mut bytes, TEXTS_AT[which])?;
    let bytes = u64::from_le_bytes(bytes);
    if bytes > TEXT_BYTES_MAX {
        return Err(TakeoverError::Ledger);
    }
    let mut text = vec![0; bytes as usize];
    ledger.read_exact_at(&mut text, TEXTS_AT[which] + 8)?;
    let mut rest = &text[..];
    let mut next = |bytes: usize| {
        let (part, behind) = rest.split_at_checked(bytes).ok_or(TakeoverError::Ledger)?;
        rest = behind;
        Ok::<_, TakeoverError>((part, behind.is_empty()))
    };
    let mut messages = Vec::new();
    let mut is_end = bytes == 0;
    while !is_end {
        let (head, _) = next(MESSAGE_HEAD_BYTES)?;
        let [bytes, descriptors] = [0, 4].map(|at| little_endian(&head[at..at + 4]) as usize);
        let is_sound = (HEADER_BYTES..=HEADER_BYTES + PAYLOAD_BYTES_MAX).contains(&bytes);
        if !is_sound || descriptors > TABLE_REGIONS_MAX {
            return Err(TakeoverError::Ledger);
        }
        let numbers = next(8 * descriptors)?.0.chunks_exact(8).map(little_endian).collect();
        let (message, end) = next(bytes)?;
        messages.push((message.to_vec(), numbers));
        is_end = end;
    }
    Ok(messages)
}

fn little_endian(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |all, byte| all << 8 | u64::from(*byte))
}
