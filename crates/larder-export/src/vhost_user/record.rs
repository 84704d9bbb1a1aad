//! What a front-end has told a disk's server and would not tell the next one: the last message of each kind, in an order
//! in which a new server can be told them.

use std::os::fd::OwnedFd;

use super::message::{FLAG_NEED_REPLY, HEADER_BYTES, number};

/// A message of either side as it came, with its descriptors.
#[derive(Debug)]
pub struct Message {
    bytes: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    /// What whoever keeps the descriptors calls each of them.
    pub(super) files: Vec<u64>,
}

impl Message {
    /// One whose header and payload are `bytes`. What a header lacks reads as 0.
    pub fn new(bytes: Vec<u8>, descriptors: Vec<OwnedFd>) -> Self {
        Self {
            bytes,
            descriptors,
            files: Vec::new(),
        }
    }

    /// One that a front-end might have sent, without descriptors.
    fn plain(request: u32, payload: &[u8]) -> Self {
        let head = [request, 1, payload.len() as u32].map(u32::to_le_bytes).concat();
        Self::new([&head, payload].concat(), Vec::new())
    }

    /// Header and payload.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// What came along.
    pub fn descriptors(&self) -> &[OwnedFd] {
        &self.descriptors
    }

    /// The request that it is, or replies to.
    pub fn request(&self) -> u32 {
        word(&self.bytes, 0)
    }

    fn needs_reply(&self) -> bool {
        word(&self.bytes, 4) & FLAG_NEED_REPLY != 0
    }

    fn payload(&self) -> &[u8] {
        self.bytes.get(HEADER_BYTES..).unwrap_or_default()
    }

    /// The little-endian u32 at byte `at` of the payload; 0 where there is none.
    fn word(&self, at: usize) -> u32 {
        word(self.payload(), at)
    }
}

fn word(bytes: &[u8], at: usize) -> u32 {
    let word = bytes.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
    word.map_or(0, u32::from_le_bytes)
}

/// What is said to a server before anything else comes what others build on; rings start when all is known.
const ORDER: &[&[u32]] = &[
    &[number::SET_OWNER],
    &[number::SET_PROTOCOL_FEATURES],
    &[number::SET_FEATURES],
    &[number::SET_STATUS],
    &[number::SET_BACKEND_REQ_FD],
    &[number::SET_LOG_BASE],
    &[number::SET_INFLIGHT_FD],
    &[number::SET_CONFIG],
    MEMORY,
    &[number::SET_VRING_NUM],
    &[number::SET_VRING_BASE],
    &[number::SET_VRING_ADDR],
    &[number::SET_VRING_CALL, number::SET_VRING_ERR],
    &[number::SET_VRING_KICK],
    &[number::SET_VRING_ENABLE],
];

const MEMORY: &[u32] = &[number::SET_MEM_TABLE, number::ADD_MEM_REG, number::REM_MEM_REG];

/// The messages, in the order in which they are to be repeated.
#[derive(Debug, Default)]
pub struct Record(Vec<Message>);

/// What a later message of the same kind is about, if it takes the place of this one.
#[derive(PartialEq, Eq)]
enum Subject {
    Device,
    Ring(u32),
    Config { offset: u32 },
    Memory { description: Vec<u8> },
}

fn subject(message: &Message) -> Subject {
    match message.request() {
        number::SET_VRING_NUM
        | number::SET_VRING_BASE
        | number::GET_VRING_BASE
        | number::SET_VRING_ADDR
        | number::SET_VRING_ENABLE => Subject::Ring(message.word(0)),
        // The byte above says whether there is a descriptor.
        number::SET_VRING_KICK | number::SET_VRING_CALL | number::SET_VRING_ERR => {
            Subject::Ring(message.word(0) & 0xff)
        }
        number::SET_CONFIG => Subject::Config {
            offset: message.word(0),
        },
        number::ADD_MEM_REG | number::REM_MEM_REG => Subject::Memory {
            // Guest address, length, address in QEMU.
            description: message.payload().get(8..32).unwrap_or_default().to_vec(),
        },
        _ => Subject::Device,
    }
}

impl Record {
    /// What a new server is to be told, first things first.
    pub fn messages(&self) -> &[Message] {
        &self.0
    }

    /// Notes what `message`, answered by `reply` if it has one, changes. Refused ones change nothing.
    pub fn note(&mut self, message: Message, reply: Option<&Message>) {
        if reply.is_some_and(|reply| is_refusal(&message, reply)) {
            return;
        }
        match message.request() {
            number::GET_VRING_BASE => {
                // It has stopped, and goes on where the reply says.
                let Some(reply) = reply else { return };
                self.forget(|said| said.request() == number::SET_VRING_KICK && subject(said) == subject(&message));
                self.put(Message::plain(number::SET_VRING_BASE, reply.payload()));
            }
            // The rings have stopped, and nobody knows where they go on. A successor starts them: it finds that in the
            // region of requests in flight, and is asked for it next.
            number::SET_STATUS if message.word(0) == 0 => self.forget(|said| said.request() == number::SET_STATUS),
            number::RESET_OWNER => self.forget(|said| said.request() == number::SET_VRING_KICK),
            number::RESET_DEVICE => self.forget(|said| {
                let of_device = [number::SET_FEATURES, number::SET_STATUS].contains(&said.request());
                of_device || matches!(subject(said), Subject::Ring(_))
            }),
            number::SET_MEM_TABLE => {
                self.forget(|said| MEMORY.contains(&said.request()));
                self.put(message);
            }
            number::REM_MEM_REG => {
                let before = self.0.len();
                self.forget(|said| said.request() == number::ADD_MEM_REG && subject(said) == subject(&message));
                if self.0.len() == before {
                    // It came with a table.
                    self.put(message);
                }
            }
            _ => self.put(message),
        }
    }

    /// A running ring has stopped there. Whoever is told of it next starts it again.
    pub(super) fn rests_at(&mut self, ring: u32, base: u32) {
        let position = [ring, base].map(u32::to_le_bytes).concat();
        self.put(Message::plain(number::SET_VRING_BASE, &position));
    }

    /// Takes in what [`Record::messages`] of another one said.
    pub(super) fn from_messages(messages: Vec<Message>) -> Self {
        Self(messages)
    }

    fn forget(&mut self, which: impl Fn(&Message) -> bool) {
        self.0.retain(|said| !which(said));
    }

    /// Puts it at its place, instead of the one before about the same. Questions have none.
    fn put(&mut self, message: Message) {
        let place = |said: &Message| ORDER.iter().position(|kind| kind.contains(&said.request()));
        let Some(ours) = place(&message) else { return };
        let same = |said: &Message| said.request() == message.request() && subject(said) == subject(&message);
        self.forget(same);
        let at = self.0.partition_point(|said| place(said) <= Some(ours));
        self.0.insert(at, message);
    }
}

/// Requests whose reply is more than that it went well.
const QUESTIONS: &[u32] = &[
    number::GET_FEATURES,
    number::GET_PROTOCOL_FEATURES,
    number::GET_QUEUE_NUM,
    number::GET_MAX_MEM_SLOTS,
    number::GET_STATUS,
    number::GET_CONFIG,
    number::GET_INFLIGHT_FD,
    number::GET_VRING_BASE,
];

/// Whether the server sends something back: an answer, or an acknowledgement where it was asked for. That of a log is
/// always sent.
pub fn has_reply(message: &Message) -> bool {
    message.needs_reply() || message.request() == number::SET_LOG_BASE || QUESTIONS.contains(&message.request())
}

/// Whether `reply` is an acknowledgement that says no.
pub fn is_refusal(message: &Message, reply: &Message) -> bool {
    !QUESTIONS.contains(&message.request()) && reply.payload().iter().any(|byte| *byte != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message about a ring or of one value, little-endian.
    fn say(record: &mut Record, request: u32, words: &[u32]) {
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        let message = Message::plain(request, &payload);
        let reply = has_reply(&message).then(|| Message::plain(request, &payload));
        record.note(message, reply.as_ref());
    }

    /// What a successor is told, with the first two words of each message.
    fn told(record: &Record) -> Vec<(u32, [u32; 2])> {
        let messages = record.messages().iter();
        messages
            .map(|said| (said.request(), [said.word(0), said.word(4)]))
            .collect()
    }

    #[test]
    fn of_each_kind_a_successor_is_told_the_last_and_first_what_others_build_on() {
        let mut record = Record::default();
        say(&mut record, number::SET_VRING_KICK, &[0x101, 0]);
        say(&mut record, number::SET_VRING_BASE, &[1, 7]);
        say(&mut record, number::SET_VRING_BASE, &[0, 8]);
        say(&mut record, number::GET_FEATURES, &[]);
        say(&mut record, number::SET_FEATURES, &[1, 0]);
        say(&mut record, number::SET_VRING_BASE, &[1, 9]);
        say(&mut record, number::SET_FEATURES, &[3, 0]);
        say(&mut record, number::SET_OWNER, &[]);
        let expected = [
            (number::SET_OWNER, [0, 0]),
            (number::SET_FEATURES, [3, 0]),
            (number::SET_VRING_BASE, [0, 8]),
            (number::SET_VRING_BASE, [1, 9]),
            (number::SET_VRING_KICK, [0x101, 0]),
        ];
        assert_eq!(told(&record), expected);
    }

    #[test]
    fn a_ring_that_was_stopped_stays_so_and_one_that_was_started_again_runs() {
        let mut record = Record::default();
        say(&mut record, number::SET_VRING_BASE, &[0, 0]);
        say(&mut record, number::SET_VRING_KICK, &[0, 0]);
        say(&mut record, number::SET_STATUS, &[15, 0]);
        // QEMU stops the device in two steps; only the second one says where the ring goes on.
        say(&mut record, number::SET_STATUS, &[0, 0]);
        let running = [(number::SET_VRING_BASE, [0, 0]), (number::SET_VRING_KICK, [0, 0])];
        assert_eq!(told(&record), running);
        say(&mut record, number::GET_VRING_BASE, &[0, 5]);
        assert_eq!(told(&record), [(number::SET_VRING_BASE, [0, 5])]);
        say(&mut record, number::SET_VRING_KICK, &[0, 0]);
        let running = [(number::SET_VRING_BASE, [0, 5]), (number::SET_VRING_KICK, [0, 0])];
        assert_eq!(told(&record), running);
    }

    #[test]
    fn memory_is_what_is_left_of_it() {
        let region = |address: u32| [0, 0, address, 0, 16, 0, 0, 0, 0, 0];
        let mut record = Record::default();
        say(&mut record, number::SET_MEM_TABLE, &[2]);
        say(&mut record, number::ADD_MEM_REG, &region(1));
        say(&mut record, number::REM_MEM_REG, &region(1));
        assert_eq!(told(&record).len(), 1, "it came and went");
        // One of the table's goes, and comes again.
        say(&mut record, number::REM_MEM_REG, &region(2));
        say(&mut record, number::ADD_MEM_REG, &region(2));
        let requests: Vec<u32> = told(&record).into_iter().map(|(request, _)| request).collect();
        let expected = [number::SET_MEM_TABLE, number::REM_MEM_REG, number::ADD_MEM_REG];
        assert_eq!(requests, expected);
        say(&mut record, number::SET_MEM_TABLE, &[1]);
        assert_eq!(told(&record).len(), 1, "a new table replaces all");
    }
}
