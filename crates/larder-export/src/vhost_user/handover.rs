//! Hand-over of a front-end's connection to the next server process. The service manager keeps the connection, and
//! the next process continues with it. The front-end sees a pause.
//!
//! The manager keeps ([`DescriptorStore`]): the connection; the descriptors that came with messages which the front-end
//! would not repeat ([`MessageRecord`]); and the ledger, a memfd with those messages themselves.
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
use super::message_record::{MessageRecord, RecordedMessage};
use crate::descriptor_store::DescriptorStore;

const MAGIC: [u8; 8] = *b"LARDERt1";

const STATE_OFFSET: u64 = 8;

/// Offset of the name of the disk's image: its length (u64), then its bytes.
const IMAGE_OFFSET: u64 = 16;

/// Longest name of an image that fits, in bytes.
pub const IMAGE_BYTES_MAX: usize = 4000;

/// Offsets of the two texts.
const TEXT_OFFSETS: [u64; 2] = [4096, 4096 + TEXT_BYTES_MAX];

/// Size of a text, in bytes. A disk of 64 queues and 509 memory regions takes about 80 KiB.
const TEXT_BYTES_MAX: u64 = 1 << 20;

const MESSAGE_HEAD_BYTES: usize = 8;

/// Configuration of the hand-over of a disk's connection.
#[derive(Clone, Debug)]
pub struct HandoverOptions {
    /// Store that keeps the connection.
    pub store: Arc<DescriptorStore>,
    /// Name of the disk in the store.
    pub disk: String,
    /// Identity of the disk's image; a guest never continues with another image. At most [`IMAGE_BYTES_MAX`] bytes of
    /// it count.
    pub image: String,
}

/// Reason why a connection cannot be continued.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum HandoverError {
    #[error("the previous process ended while it was answering a message")]
    MidMessage,
    #[error("requests were in flight, and the front-end keeps no record of them (INFLIGHT_SHMFD)")]
    NoInflightRegion,
    #[error("the service manager has not stored {0}; FileDescriptorStoreMax= may be too low")]
    Missing(String),
    #[error("the stored state of the connection is invalid")]
    MalformedLedger,
    #[error("the image of the disk was {before} then, and is another one now")]
    ImageChanged { before: String },
    #[error(transparent)]
    Io(#[from] io::Error),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle = 0,
    HandlingMessage = 1,
    Stopped = 2,
}

/// Connection that is kept for the next process.
pub(super) struct StoredConnection {
    options: HandoverOptions,
    ledger: File,
    active_text: usize,
    record: MessageRecord,
    /// Numbers of the stored descriptors of this connection.
    file_numbers: BTreeSet<u64>,
}

impl StoredConnection {
    /// Stores a new connection of the disk.
    pub(super) async fn create(on: &Loop, options: &HandoverOptions, connection: impl AsFd) -> io::Result<Self> {
        let this = Self::new(options, memfd_create("larder-connection", MemfdFlags::CLOEXEC)?.into());
        this.ledger.write_all_at(&MAGIC, 0)?;
        let image = stored_image_name(&options.image);
        this.ledger.write_all_at(&[&(image.len() as u64).to_le_bytes(), image].concat(), IMAGE_OFFSET)?;
        this.write_text(0)?;
        let (store, names) = (Arc::clone(&options.store), store_names(&options.disk));
        let files = [this.ledger.try_clone()?.into(), connection.as_fd().try_clone_to_owned()?];
        on.run_blocking(move || {
            let mut all = names.iter().zip(&files);
            all.try_for_each(|(name, file)| store.put(name, file.as_fd()))
        })
        .await??;
        Ok(this)
    }

    fn new(options: &HandoverOptions, ledger: File) -> Self {
        Self {
            options: options.clone(),
            ledger,
            active_text: 0,
            record: MessageRecord::default(),
            file_numbers: BTreeSet::new(),
        }
    }

    /// Takes over the connection that the previous process left, if it left one. A connection that cannot be
    /// continued is closed.
    pub(super) fn resume(options: &HandoverOptions) -> Result<Option<(Self, OwnedFd)>, HandoverError> {
        let names = store_names(&options.disk);
        let (ledger, connection) = match names.each_ref().map(|name| options.store.take_inherited(name)) {
            [Some(ledger), Some(connection)] => (ledger, connection),
            [None, None] => return Ok(None),
            [ledger, connection] => {
                names.iter().for_each(|name| options.store.remove(name));
                connection.iter().for_each(close);
                let missing = if ledger.is_none() { "the ledger" } else { "the connection" };
                return Err(HandoverError::Missing(missing.to_owned()));
            }
        };
        let mut this = Self::new(options, ledger.into());
        match this.load() {
            Ok(()) => Ok(Some((this, connection))),
            Err(error) => {
                close(&connection);
                this.release_files();
                Err(error)
            }
        }
    }

    fn load(&mut self) -> Result<(), HandoverError> {
        let (state, active_text) = read_state(&self.ledger)?;
        self.active_text = active_text;
        let before = read_image(&self.ledger)?;
        if before != stored_image_name(&self.options.image) {
            let before = String::from_utf8_lossy(&before).into_owned();
            return Err(HandoverError::ImageChanged { before });
        }
        let mut messages = Vec::new();
        for (bytes, numbers) in read_text(&self.ledger, active_text)? {
            let mut descriptors = Vec::new();
            for number in &numbers {
                let found = self.options.store.adopt(*number)?;
                descriptors.push(found.ok_or_else(|| HandoverError::Missing(number.to_string()))?);
                if !self.file_numbers.insert(*number) {
                    self.options.store.release(*number);
                }
            }
            let mut message = RecordedMessage::new(bytes, descriptors);
            message.file_numbers = numbers;
            messages.push(message);
        }
        let has_request = |request| messages.iter().any(|said: &RecordedMessage| said.request() == request);
        match state {
            State::HandlingMessage => return Err(HandoverError::MidMessage),
            State::Idle if has_request(number::SET_VRING_KICK) && !has_request(number::SET_INFLIGHT_FD) => {
                return Err(HandoverError::NoInflightRegion);
            }
            State::Idle | State::Stopped => {}
        }
        self.record = MessageRecord::from_messages(messages);
        // The state is idle, because requests may be in flight from now on.
        Ok(self.set_state(State::Idle)?)
    }

    /// Marks that a message is about to be read.
    pub(super) fn begin_message(&self) -> io::Result<()> {
        self.set_state(State::HandlingMessage)
    }

    /// Records a message of the front-end that is about to be answered.
    pub(super) async fn record(
        &mut self,
        on: &Loop,
        mut message: RecordedMessage,
        reply: Option<&RecordedMessage>,
    ) -> io::Result<()> {
        if !message.descriptors().is_empty() {
            let store = Arc::clone(&self.options.store);
            let (returned_message, numbers) = on
                .run_blocking(move || {
                    let shared = message.descriptors().iter().map(|file| store.share(file.as_fd()));
                    let shared: io::Result<Vec<u64>> = shared.collect();
                    (message, shared)
                })
                .await?;
            message = returned_message;
            message.file_numbers = numbers?;
        }
        let mut released = Vec::new();
        for number in &message.file_numbers {
            if !self.file_numbers.insert(*number) {
                released.push(*number);
            }
        }
        self.record.apply(message, reply);
        self.write_record(State::HandlingMessage)?;
        let file_numbers = self.record.messages().iter().flat_map(|said| &said.file_numbers);
        let file_numbers: BTreeSet<u64> = file_numbers.copied().collect();
        released.extend(self.file_numbers.difference(&file_numbers));
        self.file_numbers = file_numbers;
        if !released.is_empty() {
            let store = Arc::clone(&self.options.store);
            on.run_blocking(move || released.into_iter().for_each(|number| store.release(number))).await?;
        }
        Ok(())
    }

    /// Marks that the message was answered.
    pub(super) fn end_message(&self) -> io::Result<()> {
        self.set_state(State::Idle)
    }

    /// Returns the recorded messages.
    pub(super) fn messages(&self) -> &[RecordedMessage] {
        self.record.messages()
    }

    /// Records the position at which a ring has stopped, in memory only.
    pub(super) fn set_ring_base(&mut self, ring: u32, base: u32) {
        self.record.set_ring_base(ring, base);
    }

    /// Leaves the connection to the next process, after all requests are done.
    pub(super) fn hand_over(mut self) -> io::Result<()> {
        self.write_record(State::Stopped)
    }

    /// Removes the connection from the store, because it has ended.
    pub(super) async fn remove(self, on: &Loop) {
        // If the blocking task cannot run, the manager drops the files when the service ends.
        let _ = on.run_blocking(move || self.release_files()).await;
    }

    fn release_files(&self) {
        self.file_numbers.iter().for_each(|number| self.options.store.release(*number));
        store_names(&self.options.disk).iter().for_each(|name| self.options.store.remove(name));
    }

    /// Writes the record to the inactive half, and makes it the active one.
    fn write_record(&mut self, state: State) -> io::Result<()> {
        let inactive_text = 1 - self.active_text;
        self.write_text(inactive_text)?;
        self.active_text = inactive_text;
        self.set_state(state)
    }

    fn write_text(&self, index: usize) -> io::Result<()> {
        let mut text = vec![0; 8];
        for message in self.record.messages() {
            for count in [message.bytes().len(), message.file_numbers.len()] {
                text.extend((count as u32).to_le_bytes());
            }
            message.file_numbers.iter().for_each(|number| text.extend(number.to_le_bytes()));
            text.extend(message.bytes());
        }
        if text.len() as u64 > TEXT_BYTES_MAX {
            return Err(io::Error::other(format!("{} bytes of messages are too many to be stored", text.len())));
        }
        let bytes = text.len() as u64 - 8;
        text[..8].copy_from_slice(&bytes.to_le_bytes());
        self.ledger.write_all_at(&text, TEXT_OFFSETS[index])
    }

    /// Writes the state word. It is eight bytes of one page, so a kill happens before or after the write.
    fn set_state(&self, state: State) -> io::Result<()> {
        let mut word = [0; 8];
        word[0] = state as u8;
        word[1] = self.active_text as u8;
        self.ledger.write_all_at(&word, STATE_OFFSET)
    }
}

/// Returns the names of a disk's ledger and connection in the store.
fn store_names(disk: &str) -> [String; 2] {
    ["ledger", "connection"].map(|what| format!("{disk}/{what}"))
}

/// Returns the stored part of an image's name.
fn stored_image_name(image: &str) -> &[u8] {
    &image.as_bytes()[..image.len().min(IMAGE_BYTES_MAX)]
}

/// Closes the connection for the front-end, too, even if other processes still have descriptors of it.
fn close(connection: &OwnedFd) {
    // The connection may have ended already.
    let _ = rustix::net::shutdown(connection, rustix::net::Shutdown::Both);
}

fn read_image(ledger: &File) -> Result<Vec<u8>, HandoverError> {
    let mut bytes = [0; 8];
    ledger.read_exact_at(&mut bytes, IMAGE_OFFSET)?;
    let bytes = u64::from_le_bytes(bytes);
    if bytes > IMAGE_BYTES_MAX as u64 {
        return Err(HandoverError::MalformedLedger);
    }
    let mut image = vec![0; bytes as usize];
    ledger.read_exact_at(&mut image, IMAGE_OFFSET + 8)?;
    Ok(image)
}

fn read_state(ledger: &File) -> Result<(State, usize), HandoverError> {
    let mut head = [0; 16];
    ledger.read_exact_at(&mut head, 0)?;
    let state = [State::Idle, State::HandlingMessage, State::Stopped];
    let state = state.into_iter().find(|state| *state as u8 == head[8]);
    match state {
        Some(state) if head[..8] == MAGIC && head[9] <= 1 => Ok((state, usize::from(head[9]))),
        _ => Err(HandoverError::MalformedLedger),
    }
}

/// Bytes of a message, and the numbers of its descriptors.
type StoredMessage = (Vec<u8>, Vec<u64>);

fn read_text(ledger: &File, index: usize) -> Result<Vec<StoredMessage>, HandoverError> {
    let mut bytes = [0; 8];
    ledger.read_exact_at(&mut bytes, TEXT_OFFSETS[index])?;
    let bytes = u64::from_le_bytes(bytes);
    if bytes > TEXT_BYTES_MAX {
        return Err(HandoverError::MalformedLedger);
    }
    let mut text = vec![0; bytes as usize];
    ledger.read_exact_at(&mut text, TEXT_OFFSETS[index] + 8)?;
    let mut rest = &text[..];
    let mut take_bytes = |bytes: usize| {
        let (part, remaining) = rest.split_at_checked(bytes).ok_or(HandoverError::MalformedLedger)?;
        rest = remaining;
        Ok::<_, HandoverError>((part, remaining.is_empty()))
    };
    let mut messages = Vec::new();
    let mut is_end = bytes == 0;
    while !is_end {
        let (head, _) = take_bytes(MESSAGE_HEAD_BYTES)?;
        let [bytes, descriptors] = [0, 4].map(|at| u32_at(head, at) as usize);
        let is_valid = (HEADER_BYTES..=HEADER_BYTES + PAYLOAD_BYTES_MAX).contains(&bytes);
        if !is_valid || descriptors > TABLE_REGIONS_MAX {
            return Err(HandoverError::MalformedLedger);
        }
        let numbers = take_bytes(8 * descriptors)?.0.chunks_exact(8).map(|bytes| u64_at(bytes, 0)).collect();
        let (message, end) = take_bytes(bytes)?;
        messages.push((message.to_vec(), numbers));
        is_end = end;
    }
    Ok(messages)
}
