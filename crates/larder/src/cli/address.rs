//! Addresses of migration receivers on the command line.

use std::fmt::{self, Display};
use std::net::Ipv6Addr;

/// Default port of a receiver.
const PORT_DEFAULT: u16 = 4446;

/// A host, by name or address, and a port. The host is resolved later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReceiverAddress {
    host: String,
    port: u16,
}

impl ReceiverAddress {
    /// Parses a receiver's address: `HOST`, `HOST:PORT`, or an IPv6 address, in brackets if a port follows.
    pub(crate) fn parse_receiver(text: &str) -> Result<Self, String> {
        let hint = "give HOST or HOST:PORT, as in host2.example:4446 or [2001:db8::1]:4446";
        match Self::parse(text) {
            Ok(address) if address.port == 0 => Err(format!("port 0 cannot be connected to; {hint}")),
            address => address.map_err(|what| format!("{what}; {hint}")),
        }
    }

    /// Parses an address to listen on, in the format of [`Self::parse_receiver`]; port 0 stands for any free port.
    pub(crate) fn parse_listen(text: &str) -> Result<Self, String> {
        Self::parse(text).map_err(|what| format!("{what}; give ADDRESS:PORT, as in 0.0.0.0:4446 or [::]:4446"))
    }

    /// Returns the host alone, without brackets.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    fn parse(text: &str) -> Result<Self, String> {
        let is_ipv6 = |host: &str| host.split('%').next().is_some_and(|it| it.parse::<Ipv6Addr>().is_ok());
        let (host, port) = match text.strip_prefix('[') {
            Some(rest) => match rest.split_once(']') {
                Some((host, _)) if !is_ipv6(host) => return Err(format!("'{host}' is not an IPv6 address")),
                Some((host, "")) => (host, None),
                Some((host, rest)) => (host, Some(rest.strip_prefix(':').unwrap_or(rest))),
                None => return Err("a ']' is missing".to_owned()),
            },
            None if is_ipv6(text) => (text, None),
            None => match text.rsplit_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            },
        };
        let is_host_char = |letter: char| letter.is_ascii_alphanumeric() || "-._".contains(letter);
        if host.is_empty() {
            return Err("the host is missing".to_owned());
        }
        if !is_ipv6(host) && !host.chars().all(is_host_char) {
            return Err(format!("'{host}' is not a host name"));
        }
        // The system's resolver would take a number for an IPv4 address.
        if host.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(format!("'{host}' is a number, not a host"));
        }
        let port = match port {
            None => PORT_DEFAULT,
            // `parse` alone would also accept a sign.
            Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
                port.parse().map_err(|_| format!("'{port}' is not a port"))?
            }
            Some(port) => return Err(format!("'{port}' is not a port")),
        };
        Ok(Self { host: host.to_owned(), port })
    }
}

impl Display for ReceiverAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(out, "[{}]:{}", self.host, self.port),
            false => write!(out, "{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hosts, IPv4 and IPv6 addresses are parsed with and without a port; malformed addresses are rejected.
    #[test]
    fn address_parser_accepts_hosts_and_ports() {
        for (text, address, host) in [
            ("host2.example", "host2.example:4446", "host2.example"),
            ("host_2:1", "host_2:1", "host_2"),
            ("192.0.2.1", "192.0.2.1:4446", "192.0.2.1"),
            ("2001:db8::1", "[2001:db8::1]:4446", "2001:db8::1"),
            ("[2001:db8::1]", "[2001:db8::1]:4446", "2001:db8::1"),
            ("[::1]:65535", "[::1]:65535", "::1"),
            ("[fe80::1%2]:1", "[fe80::1%2]:1", "fe80::1%2"),
        ] {
            let read = ReceiverAddress::parse_receiver(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!((read.to_string(), read.host()), (address.to_owned(), host), "{text}");
        }
        for wrong in [
            "", ":", ":1", "h:", "h:x", "h:+1", "h:-1", "h:65536", "h:0", "h:1:2", "[", "[]", "[]:1", "[::1",
            "[::1]1x", "[::1]:", "[h]:1", "::1]", "4446", "a b", "a\nb", "tcp:h:1", "http://h", "h/1", "\u{e9}",
            "ho\0st",
        ] {
            assert!(ReceiverAddress::parse_receiver(wrong).is_err(), "{wrong:?}");
        }
        assert!(ReceiverAddress::parse_listen("[::]:0").is_ok());
    }
}
