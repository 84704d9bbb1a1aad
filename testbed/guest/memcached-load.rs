//! memcached-load: as guest-load, and the memory is that of a memcached in the guest, with random values.
//!
//! ```text
//! memcached-load [--size MIB] [--rate MB/S] [--check N]
//! ```
//!
//! Its options, and what it says: pace.rs. Sizes and rates are those of values. Of so many values that it gets as `--check`
//! says one is checked.
//!
//! Keys have 128 bytes and values 2 KiB, both random. Of ten requests nine set a value and one gets one. Keys are set one
//! after the other, from the first to the last and again. A key is got just before it is set again; of nine keys that is
//! one, in each round another.
//!
//! Memcached keeps those that were set one after the other side by side, and with its key and its header a value takes 2320
//! bytes. But its lists lead through all values, and sockets have buffers: for each byte of a value that is set, 2.8 bytes of
//! pages are dirty in the end (QEMU's calc-dirty-rate, 128 MiB at 10 and at 20 MB/s; with guest-load it is 1).
//!
//! Which version a value must have follows from how many were set so far, and its words from its key's number and its
//! version. A value that was thrown out, or not taken, is found out, too.
//!
//! Sets want no answer, and go out together with the gets before them: what costs an emulated guest most are system calls
//! and changes of process. Under TCG a core that has nothing else to do sets 55 MB/s so, and 290 without an emulator: in
//! equal parts this, memcached, and the kernel for both.
//!
//! Without dependencies: testbed/build-guest.sh compiles it.

mod pace;

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use pace::{Numbers, Options};

const ADDRESS: &str = "127.0.0.1:11211";
/// It is started just before this.
const PATIENCE: Duration = Duration::from_secs(60);

const KEY_BYTES: usize = 128;
const VALUE_BYTES: usize = 2048;
const VALUE_WORDS: usize = VALUE_BYTES / 8;
/// For each get.
const SETS: u64 = 9;

type Key = [u8; KEY_BYTES];
type Value = [u8; VALUE_BYTES];

/// Hexadecimal digits.
fn key(number: u64) -> Key {
    // No value has this place.
    const KEYS: u64 = 1 << 31;
    let mut words = [0; KEY_BYTES / 16];
    Numbers::of(KEYS | number, 0).fill(&mut words);
    let mut digits = [0; KEY_BYTES];
    for (word, digits) in words.iter().zip(digits.chunks_exact_mut(16)) {
        for (at, digit) in digits.iter_mut().enumerate() {
            *digit = b"0123456789abcdef"[(word >> (4 * at) & 15) as usize];
        }
    }
    digits
}

fn value(number: u64, version: u64) -> Value {
    let mut words = [0; VALUE_WORDS];
    Numbers::of(number, version).fill(&mut words);
    let mut bytes = [0; VALUE_BYTES];
    for (word, bytes) in words.iter().zip(bytes.chunks_exact_mut(8)) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// A connection to memcached, by its text protocol.
struct Client {
    stream: TcpStream,
    answers: BufReader<TcpStream>,
    requests: Vec<u8>,
}

impl Client {
    fn connected() -> io::Result<Self> {
        const BETWEEN: Duration = Duration::from_millis(50);
        let begun = Instant::now();
        let stream = loop {
            match TcpStream::connect(ADDRESS) {
                Err(_) if begun.elapsed() < PATIENCE => std::thread::sleep(BETWEEN),
                stream => break stream?,
            }
        };
        stream.set_nodelay(true)?;
        Ok(Self {
            answers: BufReader::new(stream.try_clone()?),
            stream,
            requests: Vec::new(),
        })
    }

    fn set(&mut self, key: &Key, value: &Value) {
        self.requests.extend_from_slice(b"set ");
        self.requests.extend_from_slice(key);
        self.requests.extend_from_slice(b" 0 0 2048 noreply\r\n");
        self.requests.extend_from_slice(value);
        self.requests.extend_from_slice(b"\r\n");
    }

    fn get(&mut self, key: &Key) {
        self.requests.extend_from_slice(b"get ");
        self.requests.extend_from_slice(key);
        self.requests.extend_from_slice(b"\r\n");
    }

    /// Sends what was asked since. Answers must be few enough to find room on their way while it does.
    fn send(&mut self) -> io::Result<()> {
        self.stream.write_all(&self.requests)?;
        self.requests.clear();
        Ok(())
    }

    /// The next value, if there is one for its key.
    fn answer(&mut self, key: &Key) -> io::Result<Option<Value>> {
        let mut wanted = b"VALUE ".to_vec();
        wanted.extend_from_slice(key);
        wanted.extend_from_slice(b" 0 2048\r\n");
        let line = self.line()?;
        if line == b"END\r\n" {
            return Ok(None);
        }
        let mut value = [0; VALUE_BYTES];
        expect(&line, &wanted)?;
        self.answers.read_exact(&mut value)?;
        expect(&self.line()?, b"\r\n")?;
        expect(&self.line()?, b"END\r\n")?;
        Ok(Some(value))
    }

    fn line(&mut self) -> io::Result<Vec<u8>> {
        const LINE_BYTES_MAX: u64 = 4096;
        let mut line = Vec::new();
        (&mut self.answers).take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
        Ok(line)
    }
}

fn expect(line: &[u8], wanted: &[u8]) -> io::Result<()> {
    if line == wanted {
        return Ok(());
    }
    let said = line.escape_ascii();
    Err(io::Error::other(format!(
        "it said '{said}', not '{}'",
        wanted.escape_ascii()
    )))
}

/// A memcached, the values of which are set one after the other, from the first to the last and again.
struct Load {
    client: Client,
    check: u64,
    /// Keys in all.
    count: u64,
    /// Values set, all rounds together; and got.
    set: u64,
    got: u64,
}

impl Load {
    fn filled(options: &Options) -> io::Result<Self> {
        const AT_ONCE: u64 = 64;
        let mut this = Self {
            client: Client::connected()?,
            check: options.check,
            count: (options.mib << 20) / VALUE_BYTES as u64,
            set: 0,
            got: 0,
        };
        while this.set < this.count {
            for number in this.set..this.count.min(this.set + AT_ONCE) {
                this.client.set(&key(number), &value(number, 0));
                this.set += 1;
            }
            this.client.send()?;
        }
        // It has taken them all when it answers.
        let last = key(this.count - 1);
        this.client.get(&last);
        this.client.send()?;
        this.client.answer(&last)?;
        Ok(this)
    }

    /// Gets and sets the next values, so many times nine.
    fn requests(&mut self, count: u64) -> io::Result<Result<(), String>> {
        let place = |at| (at % self.count, at / self.count);
        let next = self.set..self.set + count * SETS;
        let asked: Vec<_> = next
            .clone()
            .map(place)
            .filter(|(number, version)| (number + version).is_multiple_of(SETS))
            .map(|(number, version)| (number, version - 1, key(number)))
            .collect();
        // Side by side, so that they are answered together.
        asked.iter().for_each(|(.., key)| self.client.get(key));
        for (number, version) in next.map(place) {
            self.client.set(&key(number), &value(number, version));
        }
        self.set += count * SETS;
        self.client.send()?;
        for (number, version, key) in asked {
            let found = self.client.answer(&key)?;
            self.got += 1;
            if !self.got.is_multiple_of(self.check) {
                continue;
            }
            let wanted = value(number, version);
            if found.is_none_or(|found| found != wanted) {
                return Ok(Err(mismatch(number, version, found, &wanted)));
            }
        }
        Ok(Ok(()))
    }
}

impl pace::Load for Load {
    const STEP_BYTES: usize = VALUE_BYTES * SETS as usize;
    const AT_ONCE: u64 = 8;

    fn steps(&mut self, count: u64) -> Result<(), String> {
        self.requests(count).unwrap_or_else(|error| Err(of_memcached(error)))
    }

    fn rounds(&self) -> u64 {
        self.set / self.count - 1
    }
}

fn of_memcached(error: io::Error) -> String {
    format!("memcached at {ADDRESS}: {error}")
}

/// What is wrong with a value, in a line.
fn mismatch(number: u64, version: u64, found: Option<Value>, wanted: &Value) -> String {
    const OLDER_MAX: u64 = 64;
    let of = format!("value {number} version {version}");
    let Some(found) = found else {
        return format!("{of}: it is not there");
    };
    if let Some(age) = (1..=OLDER_MAX.min(version)).find(|age| value(number, version - age) == found) {
        return format!("{of}: it is {age} versions old");
    }
    let differ = found.iter().zip(wanted).filter(|(a, b)| a != b).count();
    let first = found.iter().zip(wanted).position(|(a, b)| a != b).unwrap_or(0);
    format!(
        "{of}: {differ} of its bytes differ, the first is {first}: {:#x}",
        found[first]
    )
}

fn main() -> ExitCode {
    let read = Options::read(std::env::args().skip(1)).map(|options| ((), options));
    pace::run("memcached-load", read, |(), options| {
        Load::filled(options).map_err(of_memcached)
    })
}
