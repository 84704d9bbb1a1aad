//! Hand-over of a front-end's connection to the next server process. The service manager keeps the connection, and
//! the next process continues with it. The front-end sees a pause.
//!
//! The manager keeps ([`Store`]): the connection; the descriptors that came with messages which the front-end would
//! not repeat ([`Record`]); and the ledger, a memfd with those messages themselves.
//!
//! ```text
//! ledger  0        8               16          24      4096        4096 + 1 MiB
//!         +--------+---------------+-----------+-------+-----------+-----------+
//!         | magic  | state | which | its bytes | image | text 0    | text 1    |
//!         +--------+---------------+-----------+-------+-----------+-----------+
//!         state: 1 byte; which text: 1 byte; 6 bytes of 0
//!
//! text    0        8
//!         +--------+-------------------------------------+
//!         | bytes  | messages, of that length in all     |     little-endian
//!         +--------+-------------------------------------+
//!
//! message 0       4             8
//!         +-------+-------------+---------------------+--------------------+
//!         | bytes | descriptors | a number u64 each   | header and payload |
//!         +-------+-------------+---------------------+--------------------+
//! ```
//!
//! A descriptor is stored as `larder/NUMBER`, the ledger as `larder/DISK/ledger`, the connection as
//! `larder/DISK/connection`.
//!
//! A new text is written to the inactive half, after its descriptors were stored. State and active half are then set
//! by one store of eight bytes. A killed process therefore leaves one of three states:
//!
//! | state | the next process |
//! | --- | --- |
//! | 0: between two messages | continues; the in-flight region, which is required, has the requests |
//! | 1: a message was read, and perhaps not answered | closes the connection: the front-end has to connect again |
//! | 2: stopped, all requests done | continues at the ring positions in the text |

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use larder_block::Loop;
use rustix::fs::{MemfdFlags, memfd_create};

use super::message::{HEADER_BYTES, PAYLOAD_BYTES_MAX, TABLE_REGIONS_MAX, number, u32_at, u64_at};
use super::record::{Message, Record};
use crate::descriptor_store::Store;

const MAGIC: [u8; 8] = *b"LARDERt1";

const STATE_AT: u64 = 8;

/// Offset of the name of the disk's image: its length (u64), then its bytes.
const IMAGE_AT: u64 = 16;

/// Longest name of an image that fits, in bytes.
pub const IMAGE_BYTES_MAX: usize = 4000;

/// Offsets of the two texts.
const TEXTS_AT: [u64; 2] = [4096, 4096 + TEXT_BYTES_MAX];

/// Size of a text, in bytes. A disk of 64 queues and 509 memory regions takes about 80 KiB.
const TEXT_BYTES_MAX: u64 = 1 << 20;

const MESSAGE_HEAD_BYTES: usize = 8;

/// Configuration of the hand-over of a disk's connection.
#[derive(Clone, Debug)]
pub struct Keeping {
    /// Store that keeps the connection.
    pub store: Arc<Store>,
    /// Name of the disk in the store.
    pub disk: String,
    /// Identity of the disk's image; a guest never continues with another image. At most [`IMAGE_BYTES_MAX`] bytes of
    /// it count.
    pub image: String,
}

/// Reason why a connection cannot be continued.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TakeoverError {
    #[error("the previous process ended while it was answering a message")]
    InHand,
    #[error("requests were in flight, and the front-end keeps no record of them (INFLIGHT_SHMFD)")]
    NoNotes,
    #[error("the service manager has not stored {0}; FileDescriptorStoreMax= may be too low")]
    Missing(String),
    #[error("the stored state of the connection is invalid")]
    Ledger,
    #[error("the image of the disk was {before} then, and is another one now")]
    OtherImage { before: String },
    #[error(transparent)]
    Io(#[from] io::Error),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle = 0,
    InHand = 1,
    Stopped = 2,
}

/// Connection that is kept for the next process.
pub(super) struct Kept {
    keeping: Keeping,
    ledger: File,
    which: usize,
    record: Record,
    /// Numbers of the stored descriptors of this connection.
    files: BTreeSet<u64>,
}

impl Kept {
    /// Stores a new connection of the disk.
    pub(super) async fn begin(on: &Loop, keeping: &Keeping, connection: impl AsFd) -> io::Result<Self> {
        let this = Self::new(keeping, memfd_create("larder-connection", MemfdFlags::CLOEXEC)?.into());
        this.ledger.write_all_at(&MAGIC, 0)?;
        let image = named(&keeping.image);
        this.ledger
            .write_all_at(&[&(image.len() as u64).to_le_bytes(), image].concat(), IMAGE_AT)?;
        this.write_text(0)?;
        let (store, names) = (Arc::clone(&keeping.store), names(&keeping.disk));
        let files = [
            this.ledger.try_clone()?.into(),
            connection.as_fd().try_clone_to_owned()?,
        ];
        on.run_blocking(move || {
            let mut all = names.iter().zip(&files);
            all.try_for_each(|(name, file)| store.put(name, file.as_fd()))
        })
        .await??;
        Ok(this)
    }

    fn new(keeping: &Keeping, ledger: File) -> Self {
        Self {
            keeping: keeping.clone(),
            ledger,
            which: 0,
            record: Record::default(),
            files: BTreeSet::new(),
        }
    }

    /// Takes over the connection that the previous process left, if it left one. A connection that cannot be
    /// continued is closed.
    pub(super) fn take_up(keeping: &Keeping) -> Result<Option<(Self, OwnedFd)>, TakeoverError> {
        let names = names(&keeping.disk);
        let (ledger, connection) = match names.each_ref().map(|name| keeping.store.take(name)) {
            [Some(ledger), Some(connection)] => (ledger, connection),
            [None, None] => return Ok(None),
            [ledger, connection] => {
                names.iter().for_each(|name| keeping.store.remove(name));
                connection.iter().for_each(close);
                let missing = if ledger.is_none() {
                    "the ledger"
                } else {
                    "the connection"
                };
                return Err(TakeoverError::Missing(missing.to_owned()));
            }
        };
        let mut this = Self::new(keeping, ledger.into());
        match this.read() {
            Ok(()) => Ok(Some((this, connection))),
            Err(error) => {
                close(&connection);
                this.let_go();
                Err(error)
            }
        }
    }

    fn read(&mut self) -> Result<(), TakeoverError> {
        let (state, which) = read_state(&self.ledger)?;
        self.which = which;
        let before = read_image(&self.ledger)?;
        if before != named(&self.keeping.image) {
            let before = String::from_utf8_lossy(&before).into_owned();
            return Err(TakeoverError::OtherImage { before });
        }
        let mut messages = Vec::new();
        for (bytes, numbers) in read_text(&self.ledger, which)? {
            let mut descriptors = Vec::new();
            for number in &numbers {
                let found = self.keeping.store.adopt(*number)?;
                descriptors.push(found.ok_or_else(|| TakeoverError::Missing(number.to_string()))?);
                if !self.files.insert(*number) {
                    self.keeping.store.release(*number);
                }
            }
            let mut message = Message::new(bytes, descriptors);
            message.files = numbers;
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
        self.record = Record::from_messages(messages);
        // The state is idle, because requests may be in flight from now on.
        Ok(self.set(State::Idle)?)
    }

    /// Marks that a message is about to be read.
    pub(super) fn take_in_hand(&self) -> io::Result<()> {
        self.set(State::InHand)
    }

    /// Records a message of the front-end that is about to be answered.
    pub(super) async fn note(&mut self, on: &Loop, mut message: Message, reply: Option<&Message>) -> io::Result<()> {
        if !message.descriptors().is_empty() {
            let store = Arc::clone(&self.keeping.store);
            let (told, numbers) = on
                .run_blocking(move || {
                    let shared = message.descriptors().iter().map(|file| store.share(file.as_fd()));
                    let shared: io::Result<Vec<u64>> = shared.collect();
                    (message, shared)
                })
                .await?;
            message = told;
            message.files = numbers?;
        }
        let mut released = Vec::new();
        for number in &message.files {
            if !self.files.insert(*number) {
                released.push(*number);
            }
        }
        self.record.note(message, reply);
        self.turn_page(State::InHand)?;
        let said = self.record.messages().iter().flat_map(|said| &said.files);
        let said: BTreeSet<u64> = said.copied().collect();
        released.extend(self.files.difference(&said));
        self.files = said;
        if !released.is_empty() {
            let store = Arc::clone(&self.keeping.store);
            on.run_blocking(move || released.into_iter().for_each(|number| store.release(number)))
                .await?;
        }
        Ok(())
    }

    /// Marks that the message was answered.
    pub(super) fn answered(&self) -> io::Result<()> {
        self.set(State::Idle)
    }

    /// Returns the recorded messages.
    pub(super) fn messages(&self) -> &[Message] {
        self.record.messages()
    }

    /// Records the position at which a ring has stopped, in memory only.
    pub(super) fn rests_at(&mut self, ring: u32, base: u32) {
        self.record.rests_at(ring, base);
    }

    /// Leaves the connection to the next process, after all requests are done.
    pub(super) fn leave(mut self) -> io::Result<()> {
        self.turn_page(State::Stopped)
    }

    /// Removes the connection from the store, because it has ended.
    pub(super) async fn forget(self, on: &Loop) {
        // If the blocking task cannot run, the manager drops the files when the service ends.
        let _ = on.run_blocking(move || self.let_go()).await;
    }

    fn let_go(&self) {
        self.files.iter().for_each(|number| self.keeping.store.release(*number));
        names(&self.keeping.disk)
            .iter()
            .for_each(|name| self.keeping.store.remove(name));
    }

    /// Writes the record to the inactive half, and makes it the active one.
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
            return Err(io::Error::other(format!(
                "{} bytes of messages are too many to be stored",
                text.len()
            )));
        }
        let bytes = text.len() as u64 - 8;
        text[..8].copy_from_slice(&bytes.to_le_bytes());
        self.ledger.write_all_at(&text, TEXTS_AT[which])
    }

    /// Writes the state word. It is eight bytes of one page, so a kill happens before or after the write.
    fn set(&self, state: State) -> io::Result<()> {
        let mut word = [0; 8];
        word[0] = state as u8;
        word[1] = self.which as u8;
        self.ledger.write_all_at(&word, STATE_AT)
    }
}

/// Returns the names of a disk's ledger and connection in the store.
fn names(disk: &str) -> [String; 2] {
    ["ledger", "connection"].map(|what| format!("{disk}/{what}"))
}

/// Returns the stored part of an image's name.
fn named(image: &str) -> &[u8] {
    &image.as_bytes()[..image.len().min(IMAGE_BYTES_MAX)]
}

/// Closes the connection for the front-end, too, even if other processes still have descriptors of it.
fn close(connection: &OwnedFd) {
    // The connection may have ended already.
    let _ = rustix::net::shutdown(connection, rustix::net::Shutdown::Both);
}

fn read_image(ledger: &File) -> Result<Vec<u8>, TakeoverError> {
    let mut bytes = [0; 8];
    ledger.read_exact_at(&mut bytes, IMAGE_AT)?;
    let bytes = u64::from_le_bytes(bytes);
    if bytes > IMAGE_BYTES_MAX as u64 {
        return Err(TakeoverError::Ledger);
    }
    let mut image = vec![0; bytes as usize];
    ledger.read_exact_at(&mut image, IMAGE_AT + 8)?;
    Ok(image)
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

/// Bytes of a message, and the numbers of its descriptors.
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
        let [bytes, descriptors] = [0, 4].map(|at| u32_at(head, at) as usize);
        let is_sound = (HEADER_BYTES..=HEADER_BYTES + PAYLOAD_BYTES_MAX).contains(&bytes);
        if !is_sound || descriptors > TABLE_REGIONS_MAX {
            return Err(TakeoverError::Ledger);
        }
        let numbers = next(8 * descriptors)?
            .0
            .chunks_exact(8)
            .map(|bytes| u64_at(bytes, 0))
            .collect();
        let (message, end) = next(bytes)?;
        messages.push((message.to_vec(), numbers));
        is_end = end;
    }
    Ok(messages)
}
