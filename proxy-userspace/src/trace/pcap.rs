//! Writes packets of a trace as pcapng: each packet as the program got it, and as it left it.

use std::{
    borrow::Cow,
    collections::HashMap,
    error::Error,
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use pcap_file::{
    DataLink, PcapError,
    pcapng::{
        PcapNgWriter,
        blocks::{
            enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption},
            interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption},
        },
    },
};

use super::record::TracedPacket;
use crate::output_file;

/// A file of packets could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", output_file::name(path))]
pub struct CaptureError {
    path: PathBuf,
    source: Box<dyn Error + Send + Sync>,
}

impl CaptureError {
    fn new(path: &Path, source: PcapError) -> Self {
        let source = match source {
            // The error of pcap_file says that bytes could not be read.
            PcapError::IoError(error) => error.into(),
            other => other.into(),
        };
        Self { path: path.into(), source }
    }
}

/// A pcapng file.
pub struct CaptureFile<W: Write> {
    path: PathBuf,
    writer: PcapNgWriter<W>,
    /// The numbers of interfaces by the name and kind of link.
    links: HashMap<(String, bool), u32>,
}

impl CaptureFile<BufWriter<Box<dyn Write>>> {
    /// Creates the file ([`output_file::create`]).
    pub fn create(path: &Path) -> Result<Self, CaptureError> {
        let created =
            output_file::create(path).map_err(|error| CaptureError::new(path, PcapError::IoError(error)));
        Self::new(path, BufWriter::new(created?))
    }

    /// Fails if [`Self::create`] would because of what is there ([`output_file::check_new`]).
    pub fn check_new(path: &Path) -> Result<(), CaptureError> {
        output_file::check_new(path).map_err(|error| CaptureError::new(path, PcapError::IoError(error)))
    }
}

impl<W: Write> CaptureFile<W> {
    fn new(path: &Path, to: W) -> Result<Self, CaptureError> {
        let writer = PcapNgWriter::new(to).map_err(|error| CaptureError::new(path, error))?;
        Ok(Self { path: path.into(), writer, links: HashMap::new() })
    }

    /// Writes a packet before the program and, if the program changed it, after it. The comments
    /// say which is which.
    pub fn write(&mut self, packet: &TracedPacket) -> Result<(), CaptureError> {
        let before = format!("before {}{}", packet.program, of_unchanged(packet));
        let after = format!("after {}: {}", packet.program, verdict(packet));
        let written = self.write_bytes(packet, &packet.before, &before).and_then(|()| match &packet.after {
            Some(bytes) => self.write_bytes(packet, bytes, &after),
            None => Ok(()),
        });
        written.map_err(|error| CaptureError::new(&self.path, error))
    }

    /// Writes what is buffered.
    pub fn flush(&mut self) -> Result<(), CaptureError> {
        self.writer
            .get_mut()
            .flush()
            .map_err(|error| CaptureError::new(&self.path, PcapError::IoError(error)))
    }

    fn write_bytes(&mut self, packet: &TracedPacket, bytes: &str, comment: &str) -> Result<(), PcapError> {
        let bytes = STANDARD.decode(bytes).map_err(|error| PcapError::IoError(io::Error::other(error)))?;
        let block = EnhancedPacketBlock {
            interface_id: self.interface(packet)?,
            timestamp: Duration::from_nanos(packet.time_ns),
            original_len: packet.length,
            data: Cow::Owned(bytes),
            options: vec![EnhancedPacketOption::Comment(Cow::Borrowed(comment))],
        };
        self.writer.write_pcapng_block(block).map(drop)
    }

    fn interface(&mut self, packet: &TracedPacket) -> Result<u32, PcapError> {
        let link = (packet.link.clone(), packet.is_ethernet);
        if let Some(number) = self.links.get(&link) {
            return Ok(*number);
        }
        let linktype = if packet.is_ethernet { DataLink::ETHERNET } else { DataLink::RAW };
        // Times are in nanoseconds.
        let options = vec![
            InterfaceDescriptionOption::IfName(Cow::Borrowed(&packet.link)),
            InterfaceDescriptionOption::IfTsResol(9),
        ];
        self.writer.write_pcapng_block(InterfaceDescriptionBlock { linktype, snaplen: 0, options })?;
        let number = u32::try_from(self.links.len()).unwrap_or(u32::MAX);
        self.links.insert(link, number);
        Ok(number)
    }
}

fn verdict(packet: &TracedPacket) -> String {
    let service = packet.service.as_ref().map(|service| format!(" for {service}")).unwrap_or_default();
    format!("{}{service}", packet.verdict.name())
}

/// Returns the verdict for a packet that has no second copy.
fn of_unchanged(packet: &TracedPacket) -> String {
    if packet.after.is_some() { String::new() } else { format!(": {}", verdict(packet)) }
}

#[cfg(test)]
mod tests {
    use pcap_file::pcapng::{Block, PcapNgReader};

    use super::*;
    use crate::trace::TracedVerdict;

    fn packet(link: &str, after: Option<&str>) -> TracedPacket {
        TracedPacket {
            time_ns: 1_700_000_000_000_000_001,
            link: link.to_owned(),
            is_ethernet: true,
            program: "shunt_in_eth".to_owned(),
            verdict: if after.is_some() { TracedVerdict::Translated } else { TracedVerdict::Refused },
            service: Some("shop/web".to_owned()),
            length: 1000,
            before: STANDARD.encode("before"),
            after: after.map(|bytes| STANDARD.encode(bytes)),
        }
    }

    #[test]
    fn the_error_of_the_system_is_the_cause() {
        let error = CaptureFile::create(Path::new("/nonexistent/x")).map(drop).expect_err("no such folder");
        assert_eq!(
            crate::causes::with_causes(&error),
            "cannot write /nonexistent/x: No such file or directory (os error 2)"
        );
    }

    #[test]
    fn each_packet_is_there_as_it_came_and_as_it_left() {
        let mut file = CaptureFile::new(Path::new("test"), Vec::new()).expect("a writer");
        for packet in [packet("eth0", Some("after")), packet("eth1", None), packet("eth0", None)] {
            file.write(&packet).expect("written");
        }
        let bytes = file.writer.into_inner();
        let mut reader = PcapNgReader::new(bytes.as_slice()).expect("a reader");
        let mut seen = Vec::new();
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(packet) = block.expect("a block").into_owned() {
                let Some(EnhancedPacketOption::Comment(comment)) = packet.options.first() else { panic!() };
                let data = String::from_utf8_lossy(&packet.data).into_owned();
                assert_eq!((packet.original_len, packet.timestamp.subsec_nanos()), (1000, 1));
                seen.push((packet.interface_id, data, comment.to_string()));
            }
        }
        let expected = [
            (0, "before", "before shunt_in_eth"),
            (0, "after", "after shunt_in_eth: translated for shop/web"),
            (1, "before", "before shunt_in_eth: refused for shop/web"),
            (0, "before", "before shunt_in_eth: refused for shop/web"),
        ];
        assert_eq!(seen, expected.map(|(link, data, comment)| (link, data.to_owned(), comment.to_owned())));
    }
}
